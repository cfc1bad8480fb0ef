//! The Services that fill maps, rules and folders: the same for every arm.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    num::NonZeroU16,
    sync::Arc,
};

use lb_user::{
    lab::nft,
    model::{
        BackendSet, DesiredService, Endpoint, Family, Frontend, FrontendKind, Member, ObjectName, Protocol, Scope,
        Service, ServicePort, ServiceType, SetName, Slice, SlicePort, SourceRanges, WhenEmpty,
    },
};

/// The port that clients dial.
const PORT: NonZeroU16 = NonZeroU16::new(80).expect("80 is not 0");

/// `count` Services, each with one TCP port and `endpoints` endpoints of its own, all listening on `port`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Population {
    pub(super) count: u32,
    pub(super) endpoints: u32,
    pub(super) port: NonZeroU16,
}

impl Population {
    pub(super) fn new(count: u32, endpoints: u32, port: NonZeroU16) -> Self {
        Self { count, endpoints, port }
    }

    /// What clients of a Service dial.
    #[expect(
        clippy::unused_self,
        reason = "which address it is belongs to the population, as its endpoints' do"
    )]
    pub(super) fn frontend(&self, service: u32) -> SocketAddrV4 {
        SocketAddrV4::new(address([10, 96, 0, 10], service), PORT.get())
    }

    /// One endpoint of a Service.
    pub(super) fn endpoint(&self, service: u32, endpoint: u32) -> SocketAddrV4 {
        let n = service * self.endpoints + endpoint;
        SocketAddrV4::new(address([10, 128, 0, 1], n), self.port.get())
    }

    fn endpoints_of(&self, service: u32) -> impl Iterator<Item = SocketAddrV4> + '_ {
        (0..self.endpoints).map(move |endpoint| self.endpoint(service, endpoint))
    }

    /// A Service as the fold would hand it to the compiler.
    pub(super) fn desired(&self, service: u32) -> DesiredService {
        let members = self.endpoints_of(service).map(|e| Member {
            addr: IpAddr::V4(*e.ip()),
            port: self.port,
            weight: 1,
        });
        DesiredService {
            name: name(service),
            frontends: vec![Frontend {
                addr: IpAddr::V4(*self.frontend(service).ip()),
                port: PORT,
                protocol: Protocol::Tcp,
                kind: FrontendKind::ClusterIp,
                set: 0,
                when_empty: WhenEmpty::Refuse,
                affinity_seconds: None,
                outside: None,
            }],
            sets: vec![BackendSet {
                name: SetName {
                    port_name: "".into(),
                    protocol: Protocol::Tcp,
                    ipv6: false,
                    scope: Scope::Cluster,
                },
                members: members.collect(),
                draining: Vec::new(),
            }],
            sources: Vec::new(),
        }
    }

    /// The Services as a source would hand them to the fold.
    pub(super) fn services(&self) -> Vec<Arc<Service>> {
        let service = |n| Service {
            name: name(n),
            origin: "bench".into(),
            created: Some(0),
            proxy_name: None,
            headless_label: false,
            service_type: ServiceType::ClusterIp,
            cluster_ips: [IpAddr::V4(*self.frontend(n).ip())].into(),
            external_ips: [].into(),
            load_balancer: [].into(),
            source_ranges: SourceRanges::default(),
            ports: [ServicePort {
                name: "".into(),
                protocol: Protocol::Tcp,
                port: PORT,
                node_port: None,
            }]
            .into(),
            affinity: None,
            internal_local: false,
            external_local: false,
            health_check_node_port: None,
        };
        (0..self.count).map(|n| Arc::new(service(n))).collect()
    }

    /// The EndpointSlices as a source would hand them to the fold.
    pub(super) fn slices(&self) -> Vec<Arc<Slice>> {
        (0..self.count)
            .map(|n| Arc::new(self.slice(n, self.endpoints_of(n))))
            .collect()
    }

    /// A Service's slice with one endpoint moved to an address that nobody else has; `change` tells such moves apart.
    pub(super) fn changed_slice(&self, service: u32, change: u32) -> Slice {
        let stranger = SocketAddrV4::new(address([10, 250, 0, 1], change), self.port.get());
        self.slice(service, self.endpoints_of(service).skip(1).chain([stranger]))
    }

    fn slice(&self, service: u32, endpoints: impl Iterator<Item = SocketAddrV4>) -> Slice {
        let endpoint = |address: SocketAddrV4| Endpoint {
            addr: IpAddr::V4(*address.ip()),
            ready: true,
            serving: true,
            terminating: false,
            node: None,
            zone: None,
            hints: None,
        };
        Slice {
            name: ObjectName::new("default", &format!("filler-{service}-v4")),
            service: format!("filler-{service}").into(),
            family: Family::V4,
            weight: 1,
            changed_at: None,
            ports: [SlicePort {
                name: "".into(),
                protocol: Protocol::Tcp,
                port: self.port,
            }]
            .into(),
            endpoints: endpoints.map(endpoint).collect(),
        }
    }

    /// The Services as rules of the reference.
    pub(super) fn rules(&self) -> Vec<nft::Service> {
        (0..self.count)
            .map(|n| nft::Service {
                name: format!("default/filler-{n}/tcp/http"),
                frontend: SocketAddr::V4(self.frontend(n)),
                protocol: Protocol::Tcp,
                endpoints: self.endpoints_of(n).map(SocketAddr::V4).collect(),
            })
            .collect()
    }
}

fn name(service: u32) -> ObjectName {
    ObjectName::new("default", &format!("filler-{service}"))
}

fn address(base: [u8; 4], n: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from_be_bytes(base) + n)
}
