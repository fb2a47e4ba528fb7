"""Certificates that a loss is the method that it claims to be, by its gradient at each token's log-probability.

Here live the synthetic tokens, the comparison of gradients, the names of differences, and `Subject`, what a trainer
hands over. What depends on a framework, and what a method is, live elsewhere.
"""
