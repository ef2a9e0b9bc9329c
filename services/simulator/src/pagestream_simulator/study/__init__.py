"""The autoscaling study: the clairvoyant optimum, searches of settings, and measurements of the real engine."""
