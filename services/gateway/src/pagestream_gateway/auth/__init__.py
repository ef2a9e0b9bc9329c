"""Authenticate callers: API keys, JSON Web Tokens and client certificates, and the audit log of their calls."""
