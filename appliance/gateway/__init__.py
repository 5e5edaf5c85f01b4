"""The aiohttp endpoint of a slot (stable or canary): picks an engine, relays bytes, retries, replays."""
