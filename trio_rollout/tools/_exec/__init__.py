"""Exec sessions: processes that outlive the calls that use them, and die with the block that owns them."""
