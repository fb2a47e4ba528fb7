"""Whether a loss is the method that it claims to be: its gradient by the log-probabilities, token by token.

Here live the synthetic tokens, the comparison of gradients, the names of differences, and `Subject`, what a trainer
hands over. What depends on a framework, and what a method is, live elsewhere.
"""
