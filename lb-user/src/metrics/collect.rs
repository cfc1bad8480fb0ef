//! From a snapshot to Prometheus' families.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use prometheus::{
    core::{Collector, Desc},
    proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType},
};

use super::{
    MetricSource,
    families::{self, Family, Kind, kube_proxy as names},
    roster::Roster,
    snapshot::{
        Buckets, FAILURE_REASONS, KubeProxySample, PROBE_CODES, REUSE_OUTCOMES, ServiceSample, Snapshot, reuse_outcomes,
    },
};
use crate::{
    analysis::{cause::Cause, imbalance::Imbalance, reuse::EDGES_SECONDS},
    view::{Mode, Timestamp},
};

/// Takes a snapshot at each scrape.
pub(super) struct SnapshotCollector {
    source: Arc<dyn MetricSource>,
    descriptions: Vec<Desc>,
    roster: Mutex<Roster>,
}

impl fmt::Debug for SnapshotCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotCollector")
            .field("roster", &self.roster)
            .finish_non_exhaustive()
    }
}

impl SnapshotCollector {
    pub(super) fn new(source: Arc<dyn MetricSource>, service_cap: usize) -> prometheus::Result<Self> {
        let descriptions = families::ALL
            .iter()
            .chain(names::ALL)
            .map(|family| {
                let labels = family.labels.iter().map(|&label| label.to_owned()).collect();
                Desc::new(family.name.to_owned(), family.help.to_owned(), labels, HashMap::new())
            })
            .collect::<prometheus::Result<_>>()?;
        Ok(Self {
            source,
            descriptions,
            roster: Mutex::new(Roster::new(service_cap)),
        })
    }
}

impl Collector for SnapshotCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut snapshot = self.source.snapshot();
        let services = std::mem::take(&mut snapshot.services);
        // A panic while the roster was held leaves it whole: each step of it is.
        let services = self
            .roster
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .settle(snapshot.time, services);
        let mut page = Page::default();
        page.traffic(&snapshot);
        for service in &services {
            page.service(service);
        }
        page.reuse(&snapshot);
        page.agent(&snapshot);
        page.kernel(&snapshot);
        if let Some(sample) = &snapshot.kube_proxy {
            page.kube_proxy(&snapshot, sample);
        }
        page.families
    }
}

/// The families filled so far.
#[derive(Debug, Default)]
struct Page {
    families: Vec<MetricFamily>,
    index: HashMap<&'static str, usize>,
}

impl Page {
    fn push(&mut self, family: &Family, labels: &[&str], fill: impl FnOnce(&mut Metric)) {
        debug_assert_eq!(family.labels.len(), labels.len(), "{}", family.name);
        let place = *self.index.entry(family.name).or_insert_with(|| {
            let mut made = MetricFamily::default();
            made.set_name(family.name.to_owned());
            made.set_help(family.help.to_owned());
            made.set_field_type(match family.kind {
                Kind::Counter => MetricType::COUNTER,
                Kind::Gauge => MetricType::GAUGE,
                Kind::Histogram(_) => MetricType::HISTOGRAM,
            });
            self.families.push(made);
            self.families.len() - 1
        });
        let pairs = family
            .labels
            .iter()
            .zip(labels)
            .map(|(&name, &value)| {
                let mut pair = LabelPair::default();
                pair.set_name(name.to_owned());
                pair.set_value(value.to_owned());
                pair
            })
            .collect();
        let mut metric = Metric::from_label(pairs);
        fill(&mut metric);
        self.families[place].mut_metric().push(metric);
    }

    fn counter(&mut self, family: &Family, labels: &[&str], value: f64) {
        self.push(family, labels, |metric| {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        });
    }

    fn gauge(&mut self, family: &Family, labels: &[&str], value: f64) {
        self.push(family, labels, |metric| {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        });
    }

    fn time(&mut self, family: &Family, labels: &[&str], time: Option<Timestamp>) {
        if let Some(time) = time {
            self.gauge(family, labels, time.unix_seconds());
        }
    }

    fn histogram(&mut self, family: &Family, labels: &[&str], buckets: &Buckets) {
        self.push(family, labels, |metric| {
            let mut histogram = Histogram::default();
            histogram.set_sample_count(buckets.count());
            histogram.set_sample_sum(buckets.sum());
            let edges = buckets.cumulative().map(|(edge, count)| {
                let mut bucket = Bucket::default();
                bucket.set_upper_bound(edge);
                bucket.set_cumulative_count(count);
                bucket
            });
            histogram.set_bucket(edges.collect());
            metric.set_histogram(histogram);
        });
    }

    fn traffic(&mut self, snapshot: &Snapshot) {
        for sample in &snapshot.connects {
            self.counter(&families::CONNECTS, &[sample.action, sample.hook], sample.total as f64);
        }
    }

    fn service(&mut self, sample: &ServiceSample) {
        let labels = [sample.namespace.as_str(), sample.name.as_str()];
        let with = |third| [labels[0], labels[1], third];
        self.counter(&families::SERVICE_CONNECTS, &labels, sample.connects as f64);
        self.counter(&families::SERVICE_OUTSIDE, &labels, sample.outside as f64);
        self.counter(&families::SERVICE_ATTRIBUTED, &labels, sample.attributed as f64);
        self.counter(&families::SERVICE_DIRECT, &labels, sample.direct as f64);
        for (reason, count) in FAILURE_REASONS.into_iter().zip(sample.failed) {
            self.counter(&families::SERVICE_FAILED, &with(reason), count as f64);
        }
        self.histogram(&families::CONNECT_DURATION, &labels, &sample.latency);
        self.gauge(&families::SERVICE_ACTIVE, &labels, sample.active as f64);
        let backends = sample.backends;
        for (state, count) in [
            ("active", backends.active),
            ("draining", backends.draining),
            ("ejected", backends.ejected),
        ] {
            self.gauge(&families::SERVICE_BACKENDS, &with(state), count as f64);
        }
        self.evenness(
            &labels,
            sample.imbalance,
            [
                &families::IMBALANCE_MAX,
                &families::IMBALANCE_DISPERSION,
                &families::IMBALANCE_SAMPLES,
            ],
        );
        if let Some(found) = sample.imbalance.filter(|found| !found.insufficient) {
            if let Some(cv) = found.cv {
                self.gauge(&families::IMBALANCE_CV, &labels, cv);
            }
            let beyond = f64::from(u8::from(found.alarm));
            self.gauge(&families::IMBALANCE_BEYOND_CHANCE, &labels, beyond);
        }
        self.evenness(
            &labels,
            sample.open_imbalance,
            [
                &families::OPEN_IMBALANCE_MAX,
                &families::OPEN_IMBALANCE_DISPERSION,
                &families::OPEN_IMBALANCE_SAMPLES,
            ],
        );
        for (cause, count) in Cause::ALL.into_iter().zip(sample.starved) {
            self.gauge(&families::STARVED, &with(cause.name()), count as f64);
        }
        self.gauge(&families::PORTS_USED, &labels, sample.ports_used.clamp(0.0, 1.0));
        for (outcome, count) in REUSE_OUTCOMES.into_iter().zip(sample.reuse) {
            self.counter(&families::SERVICE_REUSE, &with(outcome), count as f64);
        }
        for backend in &sample.by_backend {
            let labels = with(&backend.backend);
            self.counter(&families::BACKEND_CONNECTS, &labels, backend.connects as f64);
            self.gauge(&families::BACKEND_ACTIVE, &labels, backend.active as f64);
            if let Some(judged) = backend.judged {
                self.counter(&families::BACKEND_JUDGED, &labels, judged.observed as f64);
                self.counter(&families::BACKEND_EXPECTED, &labels, judged.expected);
            }
        }
    }

    /// Max/mean, dispersion and sample size of one view, where the sample is large enough.
    fn evenness(&mut self, labels: &[&str], found: Option<Imbalance>, families: [&Family; 3]) {
        let Some(found) = found.filter(|found| !found.insufficient) else {
            return;
        };
        let values = [found.max_over_mean, found.dispersion, Some(found.n as f64)];
        for (family, value) in families.into_iter().zip(values) {
            if let Some(value) = value {
                self.gauge(family, labels, value);
            }
        }
    }

    fn reuse(&mut self, snapshot: &Snapshot) {
        let reuse = &snapshot.reuse;
        for (outcome, count) in REUSE_OUTCOMES.into_iter().zip(reuse_outcomes(reuse)) {
            self.counter(&families::TUPLE_REUSE, &[outcome], count as f64);
        }
        const { assert!(families::REUSE_EDGES.len() == EDGES_SECONDS.len()) };
        if let Some(intervals) = Buckets::from_counts(families::REUSE_EDGES, &reuse.intervals, reuse.interval_seconds) {
            self.histogram(&families::TUPLE_INTERVAL, &[], &intervals);
        }
        self.counter(&families::TUPLE_OVERLAP, &[], reuse.overlap as f64);
        self.counter(&families::TUPLE_EVICTED, &[], snapshot.reuse_evicted as f64);
        for &(kind, count) in &snapshot.forgotten {
            self.counter(&families::FORGOTTEN, &[kind], count as f64);
        }
    }

    fn agent(&mut self, snapshot: &Snapshot) {
        self.histogram(&families::PROGRAMMING_DURATION, &[], &snapshot.network_programming);
        for sync in &snapshot.sync {
            self.histogram(&families::SYNC_DURATION, &[sync.kind], &sync.durations);
        }
        self.time(&families::SYNC_LAST, &[], snapshot.sync_last);
        self.time(&families::SYNC_QUEUED, &[], snapshot.sync_last_queued);
        for &(kind, time) in &snapshot.source_synced {
            self.time(&families::SOURCE_SYNCED, &[kind], time);
        }
        self.counter(&families::REPAIRS, &[], snapshot.repairs as f64);
        self.gauge(&families::PROBLEMS, &[], snapshot.problems as f64);
        for mode in [Mode::Balance, Mode::Observe] {
            let is = f64::from(u8::from(mode == snapshot.mode));
            self.gauge(&families::MODE, &[&mode.to_string()], is);
        }
        self.time(&families::START, &[], Some(snapshot.started));
        self.gauge(
            &families::BUILD_INFO,
            &[snapshot.version, &snapshot.abi.to_string()],
            1.0,
        );
    }

    fn kernel(&mut self, snapshot: &Snapshot) {
        for &(state, count) in &snapshot.flows {
            self.gauge(&families::FLOWS, &[state], count as f64);
        }
        for sample in &snapshot.maps {
            self.gauge(&families::MAP_ENTRIES, &[sample.map], sample.entries as f64);
            self.gauge(&families::MAP_MAX, &[sample.map], sample.max_entries as f64);
            let ratio = sample.entries as f64 / sample.max_entries.max(1) as f64;
            self.gauge(&families::MAP_PRESSURE, &[sample.map], ratio.min(1.0));
        }
        for sample in &snapshot.programs {
            self.counter(&families::PROGRAM_RUNS, &[&sample.program], sample.runs as f64);
            self.counter(
                &families::PROGRAM_SECONDS,
                &[&sample.program],
                sample.run_nanoseconds as f64 / 1e9,
            );
        }
        for &(source, count) in &snapshot.events_lost {
            self.counter(&families::EVENTS_LOST, &[source], count as f64);
        }
    }

    /// The same agent, in kube-proxy's words.
    fn kube_proxy(&mut self, snapshot: &Snapshot, sample: &KubeProxySample) {
        self.histogram(&names::SYNC, &[], &sample.sync);
        self.histogram(&names::PROGRAMMING, &[], &sample.programming);
        self.time(&names::SYNC_LAST, &[], snapshot.sync_last);
        self.time(&names::SYNC_QUEUED, &[], snapshot.sync_last_queued);
        let (came, pending) = sample.endpoint_changes;
        self.counter(&names::ENDPOINT_CHANGES, &[], came as f64);
        self.gauge(&names::ENDPOINT_CHANGES_PENDING, &[], pending as f64);
        let (came, pending) = sample.service_changes;
        self.counter(&names::SERVICE_CHANGES, &[], came as f64);
        self.gauge(&names::SERVICE_CHANGES_PENDING, &[], pending as f64);
        for (family, counts) in [(&names::HEALTHZ, sample.healthz), (&names::LIVEZ, sample.livez)] {
            for (code, count) in PROBE_CODES.into_iter().zip(counts) {
                self.counter(family, &[code], count as f64);
            }
        }
        if let Some(requests) = &sample.requests {
            // List and watch are GET, and nothing else is asked.
            for (code, &count) in &requests.by_status {
                self.counter(&names::REQUESTS, &[&code.to_string(), "GET"], count as f64);
            }
            if requests.unanswered > 0 {
                self.counter(&names::REQUESTS, &["<error>", "GET"], requests.unanswered as f64);
            }
            self.histogram(&names::REQUEST_DURATION, &["GET"], &requests.durations);
        }
        if let Some(bytes) = sample.resident_bytes {
            self.gauge(&names::RESIDENT, &[], bytes as f64);
        }
        if let Some(seconds) = sample.cpu_seconds {
            self.counter(&names::CPU, &[], seconds);
        }
    }
}
