"""Engines on Ray: detached actors that each own one engine process, and a roster of them that a router follows.

No token goes through Ray, and the router is not a process of Ray's: only :mod:`.follower`, which runs in a separate
process, connects to it. ``ray`` is imported by :mod:`.ray_access` alone.
"""
