"""Speculative decoding: drafts of the tokens after a row's last one, computed with it, and checked by sampling.

A draft is accepted where it is the token that is sampled in its place. Noise is keyed by position, so that this is the
token which a step of its own would have given: drafts change when tokens come, and no token.
"""
