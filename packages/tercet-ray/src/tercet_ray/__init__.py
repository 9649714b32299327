"""Engines on Ray: detached actors that each own one engine process, and a roster of engines that a router follows.

No tokens pass through Ray, and the router is not a process of Ray: only :mod:`.follower`, which runs in a separate
process, connects to Ray. Only :mod:`.ray_access` imports ``ray``.
"""
