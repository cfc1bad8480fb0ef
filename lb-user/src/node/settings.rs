//! The node's own settings that explain how connections spread, each with the advice that follows from its value.
//!
//! Reading and judging are apart: [`Sysctls`] is what was read, [`judge`] is pure. An advice is given only where the value
//! matters beside the proxy in use, and says what to set.

use std::{ops::RangeInclusive, time::Duration};

use serde::Serialize;

use super::{
    ipvs::{self, Timeouts},
    line_of,
    proxy::Kind,
};

/// How long a closed connection holds its client's port: `TCP_TIMEWAIT_LEN` in include/net/tcp.h, which no setting changes.
pub const TIME_WAIT: Duration = Duration::from_mins(1);
/// Below this many source ports, reuse within TIME_WAIT is to be expected at rates that one client reaches.
const FEW_PORTS: u32 = 10_000;

/// One setting of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// Its name, as sysctl has it; the timeouts of IPVS, which are none, begin with `ipvs.`.
    pub name: &'static str,
    /// Its value; none where the node does not have it or it cannot be read.
    pub value: Option<String>,
    /// What follows from the value beside the proxy in use; none where all is well.
    pub advice: Option<String>,
}

/// What was read of the node's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sysctls {
    /// `net.ipv4.vs.conn_reuse_mode`.
    ///
    /// At 0 a new connection whose 4-tuple has a kept entry goes to that entry's real server (the kernel's
    /// Documentation/networking/ipvs-sysctl.rst).
    pub conn_reuse_mode: Option<String>,
    /// `net.ipv4.vs.expire_nodest_conn`.
    ///
    /// At 0 packets of a connection whose real server was removed are dropped in silence; at 1 the entry ends with the
    /// next packet (the same document).
    pub expire_nodest_conn: Option<String>,
    /// `net.ipv4.ip_local_port_range`, as the kernel writes it.
    pub local_ports: Option<String>,
    /// `net.ipv4.ip_local_reserved_ports`: what the automatic choice of a source port leaves out.
    pub reserved_ports: Option<String>,
    /// `net.ipv4.tcp_tw_reuse`.
    ///
    /// 0 never, 1 always, 2 on loopback alone (Documentation/networking/ip-sysctl.rst): whether a client's port in TIME_WAIT
    /// may be used again after a second.
    pub tw_reuse: Option<String>,
    /// `net.ipv4.tcp_fin_timeout`: seconds in FIN_WAIT_2 of a connection that no process has any more (the same document).
    pub fin_timeout: Option<String>,
    /// `net.netfilter.nf_conntrack_tcp_timeout_time_wait`: seconds that connection tracking keeps a closed connection.
    pub conntrack_time_wait: Option<String>,
    /// How long IPVS keeps its entries.
    pub ipvs: Option<Timeouts>,
}

impl Sysctls {
    /// Reads the settings of this network namespace.
    pub fn read() -> Self {
        let read = |name: &str| line_of(&format!("/proc/sys/net/{name}")).ok();
        Self {
            conn_reuse_mode: read("ipv4/vs/conn_reuse_mode"),
            expire_nodest_conn: read("ipv4/vs/expire_nodest_conn"),
            local_ports: read("ipv4/ip_local_port_range"),
            reserved_ports: read("ipv4/ip_local_reserved_ports"),
            tw_reuse: read("ipv4/tcp_tw_reuse"),
            fin_timeout: read("ipv4/tcp_fin_timeout"),
            conntrack_time_wait: read("netfilter/nf_conntrack_tcp_timeout_time_wait"),
            ipvs: ipvs::timeouts().ok().flatten(),
        }
    }

    /// The range of source ports, both ends included.
    pub fn local_ports(&self) -> Option<RangeInclusive<u16>> {
        range(self.local_ports.as_deref()?)
    }

    /// How many source ports the automatic choice has: the range without the reserved ones.
    pub fn usable_ports(&self) -> Option<u32> {
        let ports = self.local_ports()?;
        let reserved = self.reserved_ports.as_deref().unwrap_or_default();
        let within = reserved_within(reserved, &ports);
        Some((u32::from(*ports.end()) + 1 - u32::from(*ports.start())).saturating_sub(within))
    }

    /// How many ports of the range are reserved.
    fn reserved(&self) -> Option<u32> {
        Some(reserved_within(self.reserved_ports.as_deref()?, &self.local_ports()?))
    }
}

/// Reads the settings and says what follows from each beside the proxy in use.
pub fn read(proxy: Kind) -> Vec<Setting> {
    judge(&Sysctls::read(), proxy)
}

/// How many source ports the automatic choice has in this network namespace; two files are read and nothing is asked besides.
pub fn usable_ports() -> Option<u32> {
    let sysctls = Sysctls {
        local_ports: line_of("/proc/sys/net/ipv4/ip_local_port_range").ok(),
        reserved_ports: line_of("/proc/sys/net/ipv4/ip_local_reserved_ports").ok(),
        ..Sysctls::default()
    };
    sysctls.usable_ports()
}

/// Says what follows from each setting beside a proxy.
pub fn judge(sysctls: &Sysctls, proxy: Kind) -> Vec<Setting> {
    let ipvs = matches!(proxy, Kind::KubeProxyIpvs | Kind::Ipvs);
    let pinned = ipvs && sysctls.conn_reuse_mode.as_deref() == Some("0");
    let setting = |name, value: Option<&String>, advice: Option<String>| Setting {
        name,
        value: value.cloned(),
        advice: advice.filter(|_| value.is_some()),
    };
    let timeout = |name, pick: fn(&Timeouts) -> Duration| Setting {
        name,
        value: sysctls.ipvs.as_ref().map(|t| pick(t).as_secs().to_string()),
        advice: None,
    };
    let ports = sysctls
        .local_ports()
        .map(|ports| format!("{} {}", ports.start(), ports.end()));
    let reserved = sysctls.reserved().map(|count| format!("{count} within the range"));
    vec![
        setting(
            "net.ipv4.vs.conn_reuse_mode",
            sysctls.conn_reuse_mode.as_ref(),
            pinned.then(|| {
                "set it to 1: at 0 a client's port that is used again within 120 s goes to the endpoint that it went to \
                 before, so that new endpoints get nothing; from Linux 5.9 on, 1 no longer holds such a connection up for \
                 a second"
                    .to_owned()
            }),
        ),
        setting(
            "net.ipv4.vs.expire_nodest_conn",
            sysctls.expire_nodest_conn.as_ref(),
            (ipvs && sysctls.expire_nodest_conn.as_deref() == Some("0")).then(|| {
                "set it to 1: at 0 connections to an endpoint that was removed hang until the client gives up".to_owned()
            }),
        ),
        setting(
            "net.ipv4.ip_local_port_range",
            ports.as_ref(),
            ports_advice(sysctls, pinned),
        ),
        setting("net.ipv4.ip_local_reserved_ports", reserved.as_ref(), None),
        setting("net.ipv4.tcp_tw_reuse", sysctls.tw_reuse.as_ref(), {
            (pinned && sysctls.tw_reuse.as_deref() == Some("1")).then(|| {
                "ports come back after 1 s, and IPVS then still has their entries: with conn_reuse_mode=0 more connections \
                 are pinned"
                    .to_owned()
            })
        }),
        setting(
            "net.ipv4.tcp_fin_timeout",
            sysctls.fin_timeout.as_ref(),
            (sysctls.fin_timeout.as_ref().is_some_and(|value| value != "60")).then(|| {
                format!(
                    "it ends abandoned connections sooner or later than usual, and does not change TIME_WAIT: a closed \
                     connection still holds its port for {} s",
                    TIME_WAIT.as_secs()
                )
            }),
        ),
        setting(
            "net.netfilter.nf_conntrack_tcp_timeout_time_wait",
            sysctls.conntrack_time_wait.as_ref(),
            None,
        ),
        timeout("ipvs.timeout.tcp", |t| t.tcp),
        timeout("ipvs.timeout.tcpfin", |t| t.tcp_fin),
        timeout("ipvs.timeout.udp", |t| t.udp),
    ]
}

fn ports_advice(sysctls: &Sysctls, pinned: bool) -> Option<String> {
    let ports = sysctls.usable_ports().filter(|&ports| ports < FEW_PORTS)?;
    let rate = f64::from(ports) / TIME_WAIT.as_secs_f64();
    let then = if pinned {
        ", and every port that comes back within 120 s meets its old entry in IPVS"
    } else {
        ""
    };
    Some(format!(
        "widen it: {ports} ports carry {rate:.0} new connections a second from one client address to one destination, as a \
         port is held for {} s where the client closes first{then}",
        TIME_WAIT.as_secs()
    ))
}

/// Reads two ports, the first not above the last.
fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let mut numbers = text.split_whitespace().map(str::parse::<u16>);
    let (first, last) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    (first <= last && numbers.next().is_none()).then_some(first..=last)
}

/// How many of the listed ports (`8080,9000-9100`) are in a range; the kernel lists each port once.
fn reserved_within(list: &str, ports: &RangeInclusive<u16>) -> u32 {
    let parts = list.split(',').filter_map(|part| {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        let first: u16 = first.parse().ok()?;
        let last: u16 = last.parse().ok()?;
        let (first, last) = (first.max(*ports.start()), last.min(*ports.end()));
        (first <= last).then(|| u32::from(last - first) + 1)
    });
    parts.sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn usual() -> Sysctls {
        let text = |text: &str| Some(text.to_owned());
        Sysctls {
            conn_reuse_mode: text("1"),
            expire_nodest_conn: text("1"),
            local_ports: text("32768\t60999"),
            reserved_ports: text(""),
            tw_reuse: text("2"),
            fin_timeout: text("60"),
            conntrack_time_wait: text("120"),
            ipvs: Some(Timeouts {
                tcp: Duration::from_mins(15),
                tcp_fin: Duration::from_mins(2),
                udp: Duration::from_mins(5),
            }),
        }
    }

    fn advice(sysctls: &Sysctls, proxy: Kind) -> Vec<&'static str> {
        let settings = judge(sysctls, proxy);
        settings.iter().filter(|s| s.advice.is_some()).map(|s| s.name).collect()
    }

    #[test]
    fn usual_settings_need_no_advice() {
        for proxy in [Kind::KubeProxyIpvs, Kind::Ipvs, Kind::KubeProxyNftables, Kind::Unseen] {
            assert_eq!(advice(&usual(), proxy), [""; 0], "{proxy:?}");
        }
        let values: Vec<_> = judge(&usual(), Kind::Ipvs)
            .into_iter()
            .map(|s| (s.name, s.value.expect("it was read")))
            .collect();
        assert!(values.contains(&("net.ipv4.ip_local_port_range", "32768 60999".to_owned())));
        assert!(values.contains(&("ipvs.timeout.tcpfin", "120".to_owned())));
        assert!(values.contains(&("net.ipv4.ip_local_reserved_ports", "0 within the range".to_owned())));
    }

    #[test]
    fn what_the_node_does_not_have_has_neither_value_nor_advice() {
        for setting in judge(&Sysctls::default(), Kind::Ipvs) {
            assert_eq!((setting.value, setting.advice), (None, None), "{}", setting.name);
        }
    }

    #[test]
    fn pinned_reuse_is_advised_against_beside_ipvs_alone() {
        let pinned = Sysctls {
            conn_reuse_mode: Some("0".to_owned()),
            expire_nodest_conn: Some("0".to_owned()),
            tw_reuse: Some("1".to_owned()),
            ..usual()
        };
        let names = [
            "net.ipv4.vs.conn_reuse_mode",
            "net.ipv4.vs.expire_nodest_conn",
            "net.ipv4.tcp_tw_reuse",
        ];
        assert_eq!(advice(&pinned, Kind::KubeProxyIpvs), names);
        assert_eq!(advice(&pinned, Kind::Ipvs), names);
        // The module may be loaded, and another proxy in use.
        assert_eq!(advice(&pinned, Kind::KubeProxyIptables), [""; 0]);
    }

    #[test]
    fn a_small_range_says_which_rate_it_carries() {
        let few = Sysctls {
            local_ports: Some("40000 40199".to_owned()),
            reserved_ports: Some("80,40000-40019,40199-50000".to_owned()),
            ..usual()
        };
        assert_eq!(few.usable_ports(), Some(179));
        let settings = judge(&few, Kind::Unseen);
        let ports = settings
            .iter()
            .find(|s| s.name.ends_with("port_range"))
            .expect("it is there");
        let advice = ports.advice.as_deref().expect("an advice");
        assert!(
            advice.contains("179 ports carry 3 new connections a second"),
            "{advice}"
        );
        assert!(!advice.contains("IPVS"), "{advice}");
    }

    #[test]
    fn ranges_and_lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(range("32768\t60999"), Some(32_768..=60_999));
        assert_eq!(range("1 65535"), Some(1..=65_535));
        for text in ["", "1", "2 1", "1 65536", "1 2 3", "a b"] {
            assert_eq!(range(text), None, "{text}");
        }
        assert_eq!(reserved_within("", &(1..=10)), 0);
        assert_eq!(reserved_within("5", &(1..=10)), 1);
        assert_eq!(reserved_within("8-20,30", &(1..=10)), 3);
    }

    proptest! {
        #[test]
        fn any_text_ends_without_a_panic(ports in "[0-9 \t-]{0,20}", reserved in "[0-9,-]{0,30}", any in "\\PC*") {
            for text in [&ports, &any] {
                let sysctls = Sysctls { local_ports: Some(text.clone()), reserved_ports: Some(reserved.clone()), ..usual() };
                let _outcome = judge(&sysctls, Kind::Ipvs);
            }
        }
    }
}
