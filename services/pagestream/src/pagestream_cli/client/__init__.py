"""The gateways of a deployment as commands see them: which ones there are, and their answers in the terminal."""
