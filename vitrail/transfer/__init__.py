"""Transfer of a pre-trained model to other tasks: fine-tuning, and evaluation on suites of data sets."""
