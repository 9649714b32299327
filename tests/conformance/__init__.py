"""Conformance of endpoint pickers, as a black box: README.md says how to run it against any.

Written from the endpoint picker protocol of the Gateway API Inference Extension and Envoy's external processing. It
plays Envoy, in each mode, against any server of ``envoy.service.ext_proc.v3.ExternalProcessor``. Of Tercet it imports
nothing; in Tercet's repository, without ``--target``, it is run against ``tercet epp``.
"""
