"""The trusted headers between a gateway and this engine, and the exact resumption of a stream that was cut.

Only on the Unix socket; on any other listener a request with one of these headers is refused (400 `relay_header`).

Request headers (each at most once):
  X-Appliance-Tenant: LABEL      1 to 256 characters (UTF-8). Part of the prefix cache's salt, so that tenants never share
                                 pages; shown as `key` in the log. Every generating route; elsewhere without effect.
  X-Appliance-Relay: 1           asks for what is listed under "answers". Every route.
  X-Appliance-Seed: N            0 <= N < 2**64. The seed of a request that gives none (or -1); one that gives another: 400.
  X-Appliance-Created: N         unix seconds, `created` of the answer. /v1/completions, /v1/chat/completions.
  X-Request-Id: ID               as everybody may send it; it makes the answer's `id`.
  X-Appliance-Resume: LIST       needs Relay, Seed, Created, X-Request-Id and "stream": true in the body (the same bytes
                                 as the first time). LIST = INDEX:STATE joined by commas, no spaces, each INDEX once, in any
                                 order; an INDEX that is left out has sent nothing. May be empty: nothing was sent at all.

Answers to a request with X-Appliance-Relay: 1
  Headers on a 200: X-Appliance-Seed, X-Appliance-Created, X-Request-Id (on streams and on JSON; Created on the two /v1
  routes only). They come with the first event of a stream, so before them nothing has to be replayed.
  Every event that moves a choice begins with one id line, and is otherwise what it is without Relay:
      id: INDEX:STATE\n
      data: {...}\n
      \n
  INDEX = [0-9]{1,6}, the choice's index; the usage event (stream_options.include_usage) has INDEX = number of choices.
  STATE = [0-9a-f.]{1,80} is opaque. Of the ids of one INDEX the last one counts. No id: comments (": ping"), `data: [DONE]`,
  error events. An error event ends a stream without [DONE] and begins with a comment line that tells what to do with it:
      : error CODE retry\n        another engine of this release may go on (engine_dead, shutting_down, aborted, engine_error ...)
      : error CODE final\n        to be passed on (deadline_exceeded, resume_diverged ...)
      data: {"error": {...}}\n
      \n
  An answer that is an error (status >= 400) has the same words in a header: X-Appliance-Error: CODE retry|final.

Resuming: the engine computes everything again (same bits), checks that what was sent begins what it computes (a CRC in
STATE), leaves that out, and goes on. Put behind the events before the cut, the events of the second stream give what one
undisturbed stream would have given: text, logprobs, finish reasons, usage, id, created. A LIST that cannot belong to this
request: 400 `bad_resume`. What was sent is not what this engine computes: 409 `resume_diverged` (or, if events of another
choice went out already, an error event): one of the two GPUs is wrong, or the releases differ.
"""
