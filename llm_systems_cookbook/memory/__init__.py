"""Where does a token live? In a slot of a block, and integers say which.

There are no tensors here, so a scheduler can count memory without torch.
"""

from llm_systems_cookbook.memory.allocator import BlockAllocator, OutOfBlocks
from llm_systems_cookbook.memory.manager import (
    MemoryManager,
    SharingMemory,
    Usage,
)
from llm_systems_cookbook.memory.paged import PagedMemory
from llm_systems_cookbook.memory.reservation import (
    BuddyRegions,
    FirstFitRegions,
    NoFreeRegion,
)
from llm_systems_cookbook.memory.reserved import ReservedMemory
from llm_systems_cookbook.memory.sequence_table import (
    BlockCopy,
    SequenceTable,
    fork_sequence,
)
from llm_systems_cookbook.memory.waste import (
    Occupancy,
    Waste,
    expected_waste,
    simulate_workload,
    snapshot_waste,
    time_weighted,
    waste_bound,
    whole_blocks,
)

__all__ = [
    "BlockAllocator",
    "BlockCopy",
    "BuddyRegions",
    "FirstFitRegions",
    "MemoryManager",
    "NoFreeRegion",
    "Occupancy",
    "OutOfBlocks",
    "PagedMemory",
    "ReservedMemory",
    "SequenceTable",
    "SharingMemory",
    "Usage",
    "Waste",
    "expected_waste",
    "fork_sequence",
    "simulate_workload",
    "snapshot_waste",
    "time_weighted",
    "waste_bound",
    "whole_blocks",
]
