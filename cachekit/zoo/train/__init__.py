"""How the embedded pipelines were trained: ``python -m cachekit.zoo.train emoji-flux``."""
