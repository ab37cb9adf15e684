"""A pre-trained model on other tasks: fine-tuned, or measured on suites of them."""
