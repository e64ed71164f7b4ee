"""Where weights and inputs live: devices, placement, offload, a byte planner. Not there yet: the package is empty."""
