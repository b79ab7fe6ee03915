"""Mixture-of-Experts training in PyTorch Lightning that survives failures every few minutes, bit for bit."""
