"""Time and counted operations to reach given validation accuracies, for recipes and for other libraries."""
