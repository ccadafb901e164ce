"""What can be trained: a model, its loss and its samples, by name or by import path."""
