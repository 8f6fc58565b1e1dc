"""Seeing and operating jobs: the command line. Nothing imports this package."""
