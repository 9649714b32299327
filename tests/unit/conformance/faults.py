"""What a picker may do wrong, and which cases of the suite fail then."""

from __future__ import annotations

from collections.abc import Mapping

FAULTS: Mapping[str, set[str]] = {
    "answers a second end": {"test_a_second_end_is_ignored"},
    "answers headers before the body's end": {
        "test_messages_that_no_proxy_sends",
        "test_nothing_goes_on_before_the_bodys_end",
    },
    "answers who only watches": {"test_who_only_watches_gets_no_answers"},
    "believes clients": {"test_a_client_does_not_choose_for_itself"},
    "cuts long bodies": {"test_a_body_comes_through_in_full_duplex"},
    "does not say whether it is ready": {"test_health"},
    "does not take lists apart": {"test_some_candidates"},
    "ends a body that trailers follow": {"test_trailers_after_a_body"},
    "keeps the route": {"test_the_route_is_looked_up_anew"},
    "keeps what may be dropped": {"test_what_may_be_dropped_gets_429_while_the_pool_is_full"},
    "passes candidates over": {"test_no_candidate_is_503", "test_one_candidate", "test_some_candidates"},
    "picks for a body without headers": {"test_messages_that_no_proxy_sends"},
    "picks the same one always": {"test_many_requests_at_once"},
    "reads bodies that are cut": {"test_a_body_that_is_cut_is_left_alone"},
    "refuses in words": {"test_a_refusal_is_json"},
    "refuses objectives that it does not know": {"test_an_objective_that_nobody_knows_is_no_reason_to_refuse"},
    "says 500 without endpoints": {"test_no_candidate_is_503", "test_without_a_ready_endpoint_the_answer_is_503"},
    "says another thing in metadata": {
        "test_header_and_metadata_say_the_same",
        "test_headers_alone_decide_where_no_body_is_shown",
    },
    "sends large pieces": {"test_a_body_comes_through_in_full_duplex"},
    "swallows answers' ends": {"test_an_answer_that_is_shown_after_all_is_left_as_it_is"},
    "takes bad bodies for its own fault": {
        "test_a_body_that_is_no_request_is_the_clients_fault",
        "test_trailers_and_no_body",
    },
    "takes candidates as text only": {"test_no_candidate_is_503", "test_one_candidate", "test_some_candidates"},
    "takes no candidates for all": {"test_no_candidate_is_503"},
    "writes on answers": {"test_the_answers_headers_are_left_alone"},
    "writes to namespaces of others": {"test_metadata_is_in_its_own_namespace"},
}
"""Each with the cases that fail, and no other fails."""

WIDE_FAULTS: Mapping[str, set[str]] = {
    "answers bodies plainly in full duplex": {"test_a_body_comes_through_in_full_duplex", "test_many_small_chunks"},
    "joins endpoints by spaces": {"test_endpoints_are_addresses_joined_by_commas", "test_an_endpoint_of_the_pool"},
    "leaves streamed bodies without an answer": {"test_a_streamed_body_is_answered_piece_by_piece"},
    "names hosts without ports": {"test_endpoints_are_addresses_joined_by_commas", "test_an_endpoint_of_the_pool"},
    "says nothing in metadata": {"test_header_and_metadata_say_the_same", "test_metadata_comes_with_the_header"},
    "sets headers as text": {"test_an_endpoint_of_the_pool"},
    "writes buffered bodies anew": {"test_a_buffered_body_is_left_alone"},
}
"""Each with some of the cases that fail; most others do as well, since no request goes on as it should."""
