use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    time::{Duration, Instant},
};

use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    desired::{Config, Desired, NodePortAddresses},
    model::{ObjectName, Update},
    observe::clients::Clients,
};

const WEB: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIP: 10.96.0.10
  ports: [{name: http, port: 80}]
";

fn slice(name: &str, addresses: &[&str]) -> String {
    let mut text = format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {name}\n  labels:\n    \
         kubernetes.io/service-name: web\naddressType: IPv4\nports:\n- name: http\n  port: 8080\nendpoints:\n"
    );
    for address in addresses {
        text = format!("{text}- addresses: [{address}]\n");
    }
    text
}

/// A folder source and the fold of all that it said.
struct Lab {
    folder: TempDir,
    cancel: CancellationToken,
    running: Running,
    desired: Desired,
    clients: Clients,
}

impl Lab {
    fn in_folder(folder: TempDir) -> Self {
        let cancel = CancellationToken::new();
        let running = start(folder.path().join("manifests"), &cancel);
        let desired = Desired::new(Config {
            node_name: "node-1".to_owned(),
            proxy_name: None,
            external_ips: true,
            node_port_addresses: NodePortAddresses::Primary,
            awaited: KINDS.to_vec(),
        });
        Self {
            folder,
            cancel,
            running,
            desired,
            clients: Clients::of_node("node-1"),
        }
    }

    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("manifests")).expect("a folder");
        Self::in_folder(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("manifests").join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("the file is written");
    }

    fn members(&self) -> Vec<String> {
        let service = self.desired.service(&ObjectName::new("default", "web"));
        let sets = service.map(|service| service.sets).unwrap_or_default();
        sets.iter()
            .flat_map(|set| &set.members)
            .map(|m| m.addr.to_string())
            .collect()
    }

    fn problems(&self) -> String {
        let problems: Vec<String> = self.desired.problems().iter().map(ToString::to_string).collect();
        problems.join("\n")
    }

    async fn until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(15);
        while !condition(self) {
            let wait = tokio::time::timeout_at(deadline.into(), self.running.updates.recv());
            let Ok(update) = wait.await else {
                panic!(
                    "never happened: {what}; members {:?}, problems:\n{}",
                    self.members(),
                    self.problems()
                );
            };
            let update = update.expect("the source goes on");
            self.clients.apply(&update);
            self.desired.apply(update);
        }
    }

    async fn end(self) {
        self.cancel.cancel();
        for task in self.running.tasks {
            task.await.expect("the loop ends in peace");
        }
    }
}

#[tokio::test]
async fn pods_come_change_and_go_with_their_file() {
    let mut lab = Lab::new();
    lab.until("an empty folder syncs", |lab| lab.desired.synced()).await;
    let pod = |phase: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: client, namespace: shop}}\nstatus: {{phase: {phase}, podIP: \
             10.244.1.7}}\n"
        )
    };
    let callers = |lab: &Lab| -> Option<String> {
        lab.clients
            .find([10, 244, 1, 7].into())
            .and_then(|caller| caller.workload())
    };
    for _ in 0..2 {
        lab.write("client.yaml", &pod("Running"));
        lab.until("the Pod is known", |lab| callers(lab).as_deref() == Some("shop/client"))
            .await;
        lab.write("client.yaml", &pod("Succeeded"));
        lab.until("the Pod has ended", |lab| callers(lab).is_none()).await;
    }
    lab.write("client.yaml", &pod("Running"));
    lab.until("the Pod is known", |lab| callers(lab).is_some()).await;
    fs::remove_file(lab.path("client.yaml")).expect("the file is there");
    lab.until("the Pod is gone", |lab| callers(lab).is_none()).await;
    assert_eq!(lab.problems(), "");
    lab.end().await;
}

#[tokio::test]
async fn files_are_taken_changed_and_dropped() {
    let mut lab = Lab::new();
    lab.until("an empty folder syncs", |lab| lab.desired.synced()).await;
    lab.write("web.yaml", WEB);
    lab.write("slice.yaml", &slice("web-1", &["10.0.0.1", "10.0.0.2"]));
    lab.until("both endpoints serve", |lab| lab.members() == ["10.0.0.1", "10.0.0.2"])
        .await;
    lab.write("slice.yaml", &slice("web-1", &["10.0.0.2", "10.0.0.3"]));
    lab.until("one was exchanged", |lab| lab.members() == ["10.0.0.2", "10.0.0.3"])
        .await;
    fs::remove_file(lab.path("web.yaml")).expect("the file goes");
    lab.until("the Service is gone", |lab| lab.desired.names().count() == 0)
        .await;
    assert_eq!(lab.problems(), "");
    lab.end().await;
}

#[tokio::test]
async fn a_change_arrives_within_50_ms() {
    let mut lab = Lab::new();
    lab.write("web.yaml", WEB);
    lab.until("the Service is there", |lab| lab.desired.names().count() == 1)
        .await;
    let mut best = Duration::MAX;
    // The best of several: the machine may be busy with other things.
    for i in 1..=20 {
        let address = format!("10.0.0.{i}");
        let written = Instant::now();
        lab.write("slice.yaml", &slice("web-1", &[&address]));
        lab.until("the endpoint serves", |lab| lab.members() == [&*address])
            .await;
        best = best.min(written.elapsed());
        if best <= Duration::from_millis(50) {
            return lab.end().await;
        }
    }
    panic!("the best of 20 changes took {best:?}");
}

#[tokio::test]
async fn a_broken_file_keeps_its_last_good_content_and_the_rest_goes_on() {
    let mut lab = Lab::new();
    lab.write("web.yaml", WEB);
    lab.write("a.yaml", &slice("web-1", &["10.0.0.1"]));
    lab.until("one endpoint serves", |lab| lab.members() == ["10.0.0.1"])
        .await;
    lab.write("a.yaml", "apiVersion: v1\nkind: [Service\nmetadata:\n");
    lab.until("the broken file is named", |lab| lab.problems().contains("a.yaml:"))
        .await;
    lab.write("b.yaml", &slice("web-2", &["10.0.0.2"]));
    lab.until("the other file counts", |lab| lab.members() == ["10.0.0.1", "10.0.0.2"])
        .await;
    lab.write("a.yaml", &slice("web-1", &["10.0.0.3"]));
    lab.until("the healed file counts", |lab| {
        lab.members() == ["10.0.0.2", "10.0.0.3"]
    })
    .await;
    lab.until("nothing is wrong any more", |lab| lab.problems().is_empty())
        .await;
    lab.end().await;
}

#[tokio::test]
async fn a_file_that_is_being_written_is_not_read_before_it_is_closed() {
    use std::io::Write;
    let mut lab = Lab::new();
    lab.write("web.yaml", WEB);
    lab.write("slice.yaml", &slice("web-1", &["10.0.0.1"]));
    lab.until("one endpoint serves", |lab| lab.members() == ["10.0.0.1"])
        .await;
    // Truncated, then written in two parts with other changes read in between.
    let text = slice("web-1", &["10.0.0.2", "10.0.0.3"]);
    let (first, second) = text.split_at(text.rfind("- addresses").expect("two endpoints"));
    let mut file = fs::File::create(lab.path("slice.yaml")).expect("the file opens");
    file.write_all(first.as_bytes()).expect("the first half");
    lab.write("other.yaml", &slice("web-9", &["10.0.0.9"]));
    lab.until("the other file counts, the half one not", |lab| {
        lab.members() == ["10.0.0.1", "10.0.0.9"]
    })
    .await;
    file.write_all(second.as_bytes()).expect("the second half");
    drop(file);
    lab.until("the whole file counts", |lab| {
        lab.members() == ["10.0.0.2", "10.0.0.3", "10.0.0.9"]
    })
    .await;
    lab.end().await;
}

#[tokio::test]
async fn a_missing_folder_is_waited_for_and_a_lost_one_keeps_its_content() {
    let mut lab = Lab::in_folder(tempfile::tempdir().expect("a folder"));
    lab.until("the missing folder is named", |lab| {
        lab.problems().contains("the folder cannot be read")
    })
    .await;
    assert!(!lab.desired.synced());
    let status = lab.running.status.snapshot();
    assert!(
        status
            .kinds
            .values()
            .all(|kind| kind.error.is_some() && !kind.connected),
        "{status:?}"
    );

    let folder = lab.folder.path().join("manifests");
    fs::create_dir(&folder).expect("the folder comes");
    lab.write("web.yaml", WEB);
    lab.write("slice.yaml", &slice("web-1", &["10.0.0.1"]));
    lab.until("its content counts", |lab| lab.members() == ["10.0.0.1"])
        .await;

    fs::rename(&folder, lab.folder.path().join("elsewhere")).expect("the folder goes");
    lab.until("the loss is named", |lab| {
        lab.problems().contains("the folder cannot be read")
    })
    .await;
    assert_eq!(lab.members(), ["10.0.0.1"]);
    fs::create_dir(&folder).expect("another folder comes");
    lab.write("web.yaml", WEB);
    lab.write("slice.yaml", &slice("web-1", &["10.0.0.2"]));
    lab.until("the new content counts", |lab| lab.members() == ["10.0.0.2"])
        .await;
    lab.write("slice.yaml", &slice("web-1", &["10.0.0.3"]));
    lab.until("the new folder is watched", |lab| lab.members() == ["10.0.0.3"])
        .await;
    lab.end().await;
}

#[tokio::test]
async fn a_config_map_swap_changes_all_files_at_once() {
    let mut lab = Lab::new();
    let version = |lab: &Lab, name: &str, address: &str| {
        let folder = lab.path(name);
        fs::create_dir(&folder).expect("a version");
        fs::write(folder.join("web.yaml"), WEB).expect("written");
        fs::write(folder.join("slice.yaml"), slice("web-1", &[address])).expect("written");
    };
    version(&lab, "..v1", "10.0.0.1");
    symlink("..v1", lab.path("..data")).expect("a link");
    symlink("..data/web.yaml", lab.path("web.yaml")).expect("a link");
    symlink("..data/slice.yaml", lab.path("slice.yaml")).expect("a link");
    lab.until("the first version counts", |lab| lab.members() == ["10.0.0.1"])
        .await;
    version(&lab, "..v2", "10.0.0.2");
    symlink("..v2", lab.path("..tmp")).expect("a link");
    let swapped = Instant::now();
    fs::rename(lab.path("..tmp"), lab.path("..data")).expect("the swap");
    lab.until("the second version counts", |lab| lab.members() == ["10.0.0.2"])
        .await;
    assert!(swapped.elapsed() < RESCAN / 2, "the swap was seen by the rescan alone");
    lab.end().await;
}

#[tokio::test]
async fn an_object_that_moves_between_files_is_never_gone_and_a_duplicate_is_reported() {
    let mut lab = Lab::new();
    lab.write("b.yaml", &format!("{WEB}---\n{}", slice("web-1", &["10.0.0.1"])));
    lab.until("it is there", |lab| lab.members() == ["10.0.0.1"]).await;
    lab.write("a.yaml", WEB);
    lab.until("the duplicate is reported", |lab| {
        lab.problems().contains("stands in a.yaml already")
    })
    .await;
    fs::remove_file(lab.path("a.yaml")).expect("the file goes");
    lab.until("nothing is wrong any more", |lab| lab.problems().is_empty())
        .await;
    assert_eq!(lab.members(), ["10.0.0.1"], "the Service stays in the other file");
    fs::rename(lab.path("b.yaml"), lab.path("c.yaml")).expect("renamed");
    lab.write("z.yaml", &slice("web-2", &["10.0.0.2"]));
    let mut dropped = false;
    while lab.members() != ["10.0.0.1", "10.0.0.2"] {
        let update = lab.running.updates.recv().await.expect("the source goes on");
        dropped |= matches!(update, Update::Delete(_));
        lab.desired.apply(update);
    }
    assert!(!dropped, "a renamed file's objects were dropped for a moment");
    lab.end().await;
}

mod reading {
    use super::*;
    use crate::{
        model::{Kind, Object},
        source::{
            convert::Names,
            dir::manifest::{Manifest, Syntax, parse},
        },
    };

    fn yaml(text: &str) -> Manifest {
        parse("web.yaml", Syntax::Yaml, text.as_bytes(), &mut Names::default()).expect("valid YAML")
    }

    fn said(manifest: &Manifest) -> Vec<String> {
        manifest.problems.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn names_of_manifests() {
        assert_eq!(Syntax::of("a.yaml"), Some(Syntax::Yaml));
        assert_eq!(Syntax::of("a.yml"), Some(Syntax::Yaml));
        assert_eq!(Syntax::of("a.json"), Some(Syntax::Json));
        for no in [".a.yaml", "..data", ".yaml", "yaml", "a.yaml~", "a.txt"] {
            assert_eq!(Syntax::of(no), None, "{no}");
        }
    }

    #[test]
    fn kubectl_output_is_understood_whole() {
        let text = "\
apiVersion: v1
items:
- apiVersion: v1
  kind: Service
  metadata:
    annotations:
      kubectl.kubernetes.io/last-applied-configuration: |
        {\"apiVersion\":\"v1\"}
    creationTimestamp: \"2024-05-01T10:20:30Z\"
    labels: {app: web}
    name: web
    namespace: shop
    resourceVersion: \"4711\"
    uid: 0b8a2c0e-1111-2222-3333-444455556666
    managedFields:
    - apiVersion: v1
      fieldsType: FieldsV1
      fieldsV1: {\"f:spec\": {}}
      manager: kubectl
      operation: Update
      time: \"2024-05-01T10:20:30Z\"
  spec:
    clusterIP: 10.96.0.10
    clusterIPs: [10.96.0.10, \"fd00:96::10\"]
    internalTrafficPolicy: Cluster
    ipFamilies: [IPv4, IPv6]
    ipFamilyPolicy: PreferDualStack
    ports:
    - name: http
      port: 80
      protocol: TCP
      targetPort: web
    selector: {app: web}
    sessionAffinity: None
    type: ClusterIP
  status:
    loadBalancer: {}
- apiVersion: v1
  kind: ConfigMap
  metadata: {name: other}
- apiVersion: discovery.k8s.io/v1
  kind: EndpointSlice
  addressType: IPv4
  metadata:
    name: web-abcde
    namespace: shop
    labels: {kubernetes.io/service-name: web}
    ownerReferences: [{apiVersion: v1, kind: Service, name: web, uid: 0b8a2c0e, controller: true}]
  ports:
  - {name: http, port: 8080, protocol: TCP}
  endpoints:
  - addresses: [10.0.0.1]
    conditions: {ready: true, serving: true, terminating: false}
    nodeName: node-1
    targetRef: {kind: Pod, name: web-1, namespace: shop, uid: abc}
    zone: a
kind: List
metadata:
  resourceVersion: \"\"
---
apiVersion: v1
kind: NodeList
items:
- metadata: {name: node-1, labels: {topology.kubernetes.io/zone: a}}
  status: {addresses: [{type: InternalIP, address: 192.168.0.1}, {type: Hostname, address: node-1}]}
---
apiVersion: v1
kind: PodList
items:
- metadata:
    name: nginx-6d4cf56db6-x7k2p
    namespace: shop
    labels: {pod-template-hash: 6d4cf56db6}
    ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: nginx-6d4cf56db6, uid: abc, controller: true}]
  spec: {nodeName: node-1, containers: [{name: nginx, image: nginx}]}
  status: {phase: Running, podIP: 10.244.1.7, podIPs: [{ip: 10.244.1.7}], hostIP: 192.168.0.1}
---
";
        let manifest = yaml(text);
        assert_eq!(said(&manifest), Vec::<String>::new());
        let kinds: Vec<Kind> = manifest.objects.keys().map(|key| key.kind).collect();
        assert_eq!(kinds, [Kind::Service, Kind::Slice, Kind::Node, Kind::Pod]);
        for object in manifest.objects.values() {
            match object {
                Object::Service(service) => {
                    assert_eq!(service.name, ObjectName::new("shop", "web"));
                    assert_eq!(service.created, Some(1_714_558_830));
                    assert_eq!(service.cluster_ips.len(), 2);
                }
                Object::Slice(slice) => assert_eq!(slice.endpoints[0].zone.as_deref(), Some("a")),
                Object::Node(node) => assert_eq!(node.internal_ips.len(), 1),
                Object::Pod(pod) => assert_eq!(&*pod.workload.name, "nginx"),
            }
        }
    }

    #[test]
    fn an_error_names_file_document_line_and_field() {
        let text = format!(
            "{WEB}---\napiVersion: v1\nkind: Service\nmetadata:\n  name: bad\nspec:\n  clusterIP: 10.96.0.11\n  ports:\n  - name: http\n    port: eighty\n"
        );
        let manifest = yaml(&text);
        assert_eq!(manifest.objects.len(), 1, "the other object stands");
        let said = said(&manifest);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(
            said[0].starts_with("web.yaml:16 (document 2): Service default/bad: spec.ports[0].port: "),
            "{said:?}"
        );
        assert!(said[0].contains("eighty"), "{said:?}");
    }

    #[test]
    fn a_refused_value_names_its_line() {
        let text = slice("web-1", &["10.0.0.1", "127.0.0.1", "ten"]);
        let manifest = yaml(&text);
        assert_eq!(
            said(&manifest),
            [
                "web.yaml:13: EndpointSlice default/web-1: endpoints[1].addresses[0]: 127.0.0.1 is a loopback address; \
                 wanted a unicast address that other hosts can reach",
                "web.yaml:14: EndpointSlice default/web-1: endpoints[2].addresses[0]: found \"ten\"; wanted an IPv4 or \
                 IPv6 address",
            ]
        );
        let Some(Object::Slice(slice)) = manifest.objects.values().next() else {
            panic!("the slice stands");
        };
        assert_eq!(slice.endpoints.len(), 1);
    }

    #[test]
    fn json_is_read_and_its_errors_have_lines_too() {
        let text = "{\n\t\"apiVersion\": \"v1\",\n\t\"kind\": \"Service\",\n\t\"metadata\": {\"name\": \"web\"},\n\t\"spec\": {\n\t\t\"clusterIP\": \"10.96.0.10\",\n\t\t\"externalIPs\": [\n\t\t\t\"127.0.0.1\"\n\t\t],\n\t\t\"ports\": [{\"port\": 80}]\n\t}\n}\n";
        let manifest = parse("web.json", Syntax::Json, text.as_bytes(), &mut Names::default()).expect("valid JSON");
        assert_eq!(manifest.objects.len(), 1);
        assert!(
            said(&manifest)[0].contains("spec.externalIPs[0]"),
            "{:?}",
            said(&manifest)
        );
        assert!(said(&manifest)[0].starts_with("web.json:8: "), "{:?}", said(&manifest));

        let broken = parse("web.json", Syntax::Json, b"{\n\"kind\": ]", &mut Names::default());
        assert!(broken.expect_err("no JSON").to_string().starts_with("web.json:2: "));
    }

    #[test]
    fn hostile_yaml_is_refused_quickly() {
        let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
        for i in 1..40 {
            let previous = format!("*a{},", i - 1).repeat(10);
            bomb = format!("{bomb}a{i}: &a{i} [{}]\n", previous.trim_end_matches(','));
        }
        let deep = "[".repeat(100_000);
        for text in [
            bomb.as_str(),
            deep.as_str(),
            "\u{0}\u{1}",
            "a: \t- b",
            "kind: !!binary x\n--- &a *a",
        ] {
            let started = Instant::now();
            let _ = parse("web.yaml", Syntax::Yaml, text.as_bytes(), &mut Names::default());
            assert!(
                started.elapsed() < Duration::from_secs(10),
                "took {:?}",
                started.elapsed()
            );
        }
        assert!(parse("web.yaml", Syntax::Yaml, bomb.as_bytes(), &mut Names::default()).is_err());
        assert!(parse("web.json", Syntax::Json, deep.as_bytes(), &mut Names::default()).is_err());
    }

    #[test]
    fn documents_that_are_no_objects_are_reported() {
        let manifest = yaml(
            "- a\n---\nname: x\n---\napiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata: {name: x}\n",
        );
        let said = said(&manifest);
        assert_eq!(said.len(), 3, "{said:?}");
        assert!(said[0].contains("found a list"), "{said:?}");
        assert!(said[1].contains("(document 2)") && said[1].contains("kind"), "{said:?}");
        assert!(said[2].contains("discovery.k8s.io/v1beta1"), "{said:?}");
    }
}

#[test]
fn a_path_is_needed() {
    assert_eq!("dir:/etc/x".parse(), Ok(Source::Dir(Path::new("/etc/x").to_owned())));
    assert_eq!("kube".parse(), Ok(Source::Kube));
    for bad in ["dir:", "dir", "kube:x", "/etc/x", ""] {
        assert!(bad.parse::<Source>().is_err(), "{bad}");
    }
}
