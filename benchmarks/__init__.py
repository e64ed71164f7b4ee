"""Measurements of speed, compute, memory and fidelity, made in one run with one seed; the runner is not there yet."""
