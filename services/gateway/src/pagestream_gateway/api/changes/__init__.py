"""Calls by which operators change what a deployment serves.

They exist where a setting opens them to all callers, or administrators have keys.
"""
