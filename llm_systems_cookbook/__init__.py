"""The finished code of the LLM Systems Cookbook; each room answers a question.

`memory`: where does a token live? `attention`: where are the bytes, and how
does a query meet them? `models`: what computes? `serving`: who runs in the
next step? `workloads`: who asks? `nb`: what does a notebook say? `plots`:
what does a reader see? `tools`: what does a maintainer run?
"""

__version__ = "0.1.0"
