"""Experiments: one module per question, run from a checkout with `python -m experiments {list,run,report,doctor}`.

`pip install paxkv` gives the library; clone the repository to run experiments.
"""
