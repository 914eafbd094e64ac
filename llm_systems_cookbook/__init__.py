"""The finished code of the LLM Systems Cookbook.

Three rooms, one question each: `memory` says where a token lives, `attention`
holds and reads the bytes, `serving` decides who runs.
"""

__version__ = "0.1.0"
