"""Communication: the operations an algorithm may ask for, and the runners that carry them out."""
