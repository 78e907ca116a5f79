"""Building blocks: what several algorithms are made of. None of these is a method by itself."""
