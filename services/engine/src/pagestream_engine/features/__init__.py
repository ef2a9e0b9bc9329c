"""Features beside the common path, each in a module or folder of its own: its options' checks, its state and its calls.

A step enters a feature only where an option has turned it on or one of its requests uses it.
"""
