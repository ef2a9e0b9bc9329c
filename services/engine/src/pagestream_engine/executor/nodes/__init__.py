"""Ranks of a group on other machines: how they join the leader, and what is sent between them."""
