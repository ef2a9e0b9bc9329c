"""One module for each family that runs on fused layers: configuration, weight mapping, assembly."""
