"""Where guesses come from: the text itself, a small model, the model's own heads."""
