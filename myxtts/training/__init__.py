"""What a stage learns and how: optimiser, losses, recipes and the loop, which cannot tell one GPU from two."""
