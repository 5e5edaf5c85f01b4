"""The netfilter rules of the canary: read -> plan (pure) -> apply. See model.py for what the rules are."""
