"""Input builders, one file per family of denoisers; each registers its cases when imported."""
