"""Conformance of endpoint pickers, as a black box: ``pytest tests/conformance --target HOST:PORT --endpoints A,B,C``.

Written from the endpoint picker protocol of the Gateway API Inference Extension and Envoy's external processing. It
plays Envoy, in each mode, against any server of ``envoy.service.ext_proc.v3.ExternalProcessor``. Without ``--target``
it is run against ``tercet epp``.
"""
