"""Several processes that train one network: sums of gradients, sharded weights, and the forecast of many GPUs."""
