"""The engine side: claim requests, append tokens, hand back."""
