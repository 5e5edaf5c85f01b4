"""Clients of the endpoint during a canary run: new connections, keep-alive ones and streams; every sixth prompt has the
poison. Prints "up" and, once stdin has ended, a JSON object: how often which end came. Standard library only: it also
runs inside the test hosts.

    python clients.py ADDRESS PORT[,PORT...] POISON [--model NAME] [--key KEY] [--tokens 24] [--think 0]
"""

import argparse
import http.client
import json
import sys
import threading

KINDS = [(kept, stream) for kept in (False, True) for stream in (False, True)]  # a client each
GOOD_ENDS = {"answer", "stream"}
ERRORS = {"status 500", "stream with an error"}
POISON = "~"  # a byte that no golden prompt has


class Clients:
    def __init__(self, options):
        self.options, self.counts, self.lock, self.stop = options, {}, threading.Lock(), threading.Event()

    def run(self):
        threads = [threading.Thread(target=self.client, args=(*kind, who)) for who, kind in enumerate(KINDS)]
        for thread in threads:
            thread.start()
        print("up", flush=True)
        sys.stdin.read()
        self.stop.set()
        for thread in threads:
            thread.join()
        print(json.dumps(self.counts))

    def client(self, kept, stream, who):
        address, port = self.options.address, self.options.ports[who % len(self.options.ports)]
        source = (address, 0) if address == "127.0.0.1" else None  # as in tests/ansible/traffic.py
        number, connection = 1000 * who, None
        while not self.stop.is_set():
            number += 1
            try:
                if connection is None:
                    connection = http.client.HTTPConnection(address, port, timeout=240, source_address=source)
                end = self.ask(connection, number, stream)
                if not kept or connection.sock is None:
                    connection.close()
                    connection = None
            except Exception as error:
                end, connection = f"{type(error).__name__}: {error}", None
            with self.lock:
                self.counts[end] = self.counts.get(end, 0) + 1
            self.stop.wait(self.options.think)

    def ask(self, connection, number, stream):
        options = self.options
        prompt = f"request {number}" + (options.poison if number % 6 == 0 else "")
        body = {
            "model": options.model, "prompt": prompt, "max_tokens": options.tokens, "temperature": 0, "stream": stream,
            "ignore_eos": True,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        if options.key:
            headers["Authorization"] = f"Bearer {options.key}"
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            return f"status {answer.status}"
        if stream:
            return "stream" if text.rstrip().endswith(b"[DONE]") and b'"error"' not in text else "stream with an error"
        return "answer" if json.loads(text)["usage"]["completion_tokens"] == options.tokens else "half an answer"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("ports", metavar="PORT", type=lambda text: [int(port) for port in text.split(",")])
    parser.add_argument("poison")
    parser.add_argument("--model", default="chat")
    parser.add_argument("--key")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--think", type=float, default=0.0, help="seconds between the requests of a client")
    Clients(parser.parse_args()).run()


if __name__ == "__main__":
    main()
