"""Several processes that train one network: their start, what they exchange, and their failures."""
