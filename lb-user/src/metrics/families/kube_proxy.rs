//! kube-proxy's metrics that this agent has true numbers for, under kube-proxy's names: served on request, in balance mode.
//!
//! Names, types and edges are kube-proxy's, so that its dashboards and alerts go on. What has no true value here has no series: there
//! are no goroutines, no rules of iptables, and nothing is sent to the API server but GET.

use super::{Family, Kind, PROGRAMMING_EDGES};

/// kube-proxy's edges of a synchronisation: doubled from a millisecond.
pub const SYNC_EDGES: &[f64] = &[
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384,
];
/// Kubernetes' edges of a client's requests.
pub const REQUEST_EDGES: &[f64] = &[0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];

families! {
    SYNC Kind::Histogram(SYNC_EDGES), "kubeproxy_sync_proxy_rules_duration_seconds", [],
        "Time that writing changes to the kernel's maps took, both families of addresses at once.", "";
    PROGRAMMING Kind::Histogram(PROGRAMMING_EDGES), "kubeproxy_network_programming_duration_seconds", [],
        "Time from the change that an EndpointSlice is annotated with (endpoints.kubernetes.io/last-change-trigger-time) to its effect.",
        "";
    SYNC_LAST Kind::Gauge, "kubeproxy_sync_proxy_rules_last_timestamp_seconds", [],
        "When changes were last applied to the kernel.", "until the first application";
    SYNC_QUEUED Kind::Gauge, "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", [],
        "When a change last came in.", "until the first change";
    ENDPOINT_CHANGES Kind::Counter, "kubeproxy_sync_proxy_rules_endpoint_changes_total", [],
        "Changes of EndpointSlices that came in: all of the first list; of a later one, one for each Service that it changes.", "";
    ENDPOINT_CHANGES_PENDING Kind::Gauge, "kubeproxy_sync_proxy_rules_endpoint_changes_pending", [],
        "Changes of EndpointSlices that are not in the kernel yet.", "";
    SERVICE_CHANGES Kind::Counter, "kubeproxy_sync_proxy_rules_service_changes_total", [],
        "Changes of Services that came in: all of the first list; of a later one, one for each Service that it changes.", "";
    SERVICE_CHANGES_PENDING Kind::Gauge, "kubeproxy_sync_proxy_rules_service_changes_pending", [],
        "Changes of Services that are not in the kernel yet.", "";
    HEALTHZ Kind::Counter, "kubeproxy_proxy_healthz_total", ["code"],
        "Answers to /healthz by HTTP status.", "";
    LIVEZ Kind::Counter, "kubeproxy_proxy_livez_total", ["code"],
        "Answers to /livez by HTTP status.", "";
    REQUESTS Kind::Counter, "rest_client_requests_total", ["code", "method"],
        "Requests to the API server by HTTP status, <error> where none came.", "unless the agent runs with --source kube";
    REQUEST_DURATION Kind::Histogram(REQUEST_EDGES), "rest_client_request_duration_seconds", ["verb"],
        "Time from a request to the API server to the head of its answer.", "unless the agent runs with --source kube";
    RESIDENT Kind::Gauge, "process_resident_memory_bytes", [],
        "Memory of the agent's process that is resident; maps that it has mapped count.", "";
    CPU Kind::Counter, "process_cpu_seconds_total", [],
        "Time that the agent's process spent on CPUs, for itself and in the kernel.", "";
}
