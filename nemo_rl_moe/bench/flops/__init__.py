"""Model FLOPs of training: the count, term by term, and what tokens a second it makes of TFLOP/s and back."""
