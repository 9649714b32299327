"""Engines on Ray: detached actors that each own one engine process, and a roster of them that a router follows.

No token goes through Ray, and the router is no process of Ray's: only :mod:`.follower` and :mod:`.stopping`, which run
in separate processes, connect to it. ``ray`` is imported by :mod:`.ray_access` and by code that runs in actors.
"""
