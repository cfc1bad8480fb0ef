//! How much memory the input takes: 10,000 Services with 10 endpoints each, converted as a source does it, and folded.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use lb_user::{
    desired::{Config, Desired, NodePortAddresses},
    model::{Content, Kind, Object, Service, Slice, Update},
    source::convert::{Converter, Names},
};
use serde_json::json;

/// Counts what is allocated. One test in this file, so that nobody else's memory is counted.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes on to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A block of the usual allocators carries 8 bytes of its own and is a multiple of 16.
        let size = (layout.size() + 8).next_multiple_of(16).max(32);
        let live = LIVE.fetch_add(size, Ordering::Relaxed) + size;
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub((layout.size() + 8).next_multiple_of(16).max(32), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SERVICES: u32 = 10_000;
const ENDPOINTS: u32 = 10;

fn service(i: u32) -> serde_json::Value {
    json!({
        "metadata": {"name": format!("service-{i}"), "namespace": format!("namespace-{}", i % 100)},
        "spec": {
            "clusterIPs": [std::net::Ipv4Addr::from(0x0a60_0000 + i).to_string()],
            "ports": [{"name": "http", "port": 80}, {"name": "metrics", "port": 9090}],
        },
    })
}

fn slice(i: u32) -> serde_json::Value {
    let endpoint = |k: u32| {
        json!({
            "addresses": [std::net::Ipv4Addr::from(0x0a00_0000 + i * ENDPOINTS + k).to_string()],
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "nodeName": format!("node-{}", (i * ENDPOINTS + k) % 1000),
            "zone": format!("zone-{}", k % 3),
            "hints": {"forZones": [{"name": format!("zone-{}", k % 3)}]},
        })
    };
    json!({
        "metadata": {
            "name": format!("service-{i}-x7k2p"), "namespace": format!("namespace-{}", i % 100),
            "labels": {"kubernetes.io/service-name": format!("service-{i}")},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080}, {"name": "metrics", "port": 9090}],
        "endpoints": (0..ENDPOINTS).map(endpoint).collect::<Vec<_>>(),
    })
}

/// A list as a source makes it: each object exists alone before it becomes a flat record.
fn list(names: &mut Names) -> (Vec<std::sync::Arc<Service>>, Vec<std::sync::Arc<Slice>>) {
    let mut converter = Converter {
        origin: names.share("API server"),
        names,
    };
    let (mut services, mut slices) = (Vec::new(), Vec::new());
    for i in 0..SERVICES {
        let typed = serde_json::from_value(service(i)).expect("a Service");
        if let Some(Object::Service(service)) = converter.service(&typed).object {
            services.push(service);
        }
        let typed = serde_json::from_value(slice(i)).expect("an EndpointSlice");
        if let Some(Object::Slice(slice)) = converter.slice(&typed).object {
            slices.push(slice);
        }
    }
    (services, slices)
}

#[test]
fn ten_thousand_services_with_ten_endpoints_fit() {
    let before = LIVE.load(Ordering::Relaxed);
    let mut desired = Desired::new(Config {
        node_name: "node-1".to_owned(),
        proxy_name: None,
        external_ips: true,
        node_port_addresses: NodePortAddresses::Primary,
        awaited: vec![Kind::Service, Kind::Slice],
    });
    let mut names = Names::default();
    let (services, slices) = list(&mut names);
    assert_eq!((services.len(), slices.len()), (SERVICES as usize, SERVICES as usize));
    desired.apply(Update::Replace(Content::Services(services)));
    desired.apply(Update::Replace(Content::Slices(slices)));
    assert_eq!(desired.names().count(), SERVICES as usize);
    let held = (LIVE.load(Ordering::Relaxed) - before) >> 10;

    // Another list of the same: the relist's peak is one list more, until it has been compared.
    PEAK.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
    let (services, slices) = list(&mut names);
    let changed = desired.apply(Update::Replace(Content::Services(services)));
    assert!(changed.is_empty());
    assert!(desired.apply(Update::Replace(Content::Slices(slices))).is_empty());
    let after = (LIVE.load(Ordering::Relaxed) - before) >> 10;
    let peak = (PEAK.load(Ordering::Relaxed) - before) >> 10;

    println!("held {held} KiB, after a relist {after} KiB, peak {peak} KiB");
    assert!(held <= 32 << 10, "the input holds {held} KiB");
    assert!(
        after <= held + (1 << 10),
        "a relist leaves {after} KiB where {held} KiB were"
    );
    assert!(
        peak <= held * 2,
        "the relist's peak is {peak} KiB where {held} KiB are held"
    );
}
