"""Looking inside a Vision Transformer: attention, features and saliency, as numbers and as pictures."""
