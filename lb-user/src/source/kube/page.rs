//! Answers of the API server, taken apart item by item.
//!
//! Pure. Of a page only one item at a time exists as a Kubernetes object, made from the page's own text. An item that cannot be
//! read but has a name is that object's problem alone; an answer whose items have no names is no answer.

use std::{borrow::Cow, fmt};

use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery};
use serde::{
    Deserialize,
    de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Value, value::RawValue};

use crate::{
    model::{Kind, ObjectKey, ObjectName, Problem},
    source::convert::{Converted, Converter, PodObject, object_label},
};

/// What a page says beside its items.
#[derive(Debug, Default)]
pub(super) struct PageHead {
    /// The version that the whole list shows.
    pub(super) version: String,
    /// What to ask for the next page; `None` on the last.
    pub(super) next: Option<String>,
}

/// Reads a page; each item goes to `take` as soon as it is parsed.
///
/// # Errors
/// The text is no list of the wanted kind, or one of its items is nothing.
pub(super) fn read_page(
    text: &[u8],
    kind: Kind,
    converter: &mut Converter<'_>,
    take: &mut dyn FnMut(Converted),
) -> Result<PageHead, String> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let seed = PageSeed { kind, converter, take };
    let head = seed.deserialize(&mut deserializer).map_err(|error| error.to_string())?;
    deserializer.end().map_err(|error| error.to_string())?;
    Ok(head)
}

/// One event of a watch.
#[derive(Debug)]
pub(super) enum WatchEvent {
    /// An object came or changed.
    Applied(Converted, String),
    /// An object went.
    Deleted(ObjectKey, String),
    /// Nothing happened, up to this version.
    Bookmark(String),
    /// The watch is over.
    Error {
        /// The status code.
        code: i64,
        /// What the server said.
        message: String,
    },
}

/// Reads one event.
///
/// # Errors
/// The text is no event, or its object is nothing.
pub(super) fn read_event(text: &[u8], kind: Kind, converter: &mut Converter<'_>) -> Result<WatchEvent, String> {
    #[derive(Deserialize)]
    struct Envelope<'a> {
        #[serde(rename = "type", borrow)]
        event_type: Cow<'a, str>,
        #[serde(borrow)]
        object: &'a RawValue,
    }

    let Envelope { event_type, object } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if event_type == "ERROR" {
        let object: Value = serde_json::from_str(object.get()).map_err(|error| error.to_string())?;
        return Ok(WatchEvent::Error {
            code: object["code"].as_i64().unwrap_or_default(),
            message: object["message"].as_str().unwrap_or("(no message)").to_owned(),
        });
    }
    let head = Head::of(object)?;
    let version = head.metadata["resourceVersion"].as_str().unwrap_or_default().to_owned();
    if version.is_empty() {
        return Err(format!("a {event_type} event without metadata.resourceVersion"));
    }
    match &*event_type {
        "ADDED" | "MODIFIED" => Ok(WatchEvent::Applied(read_item(object, kind, converter)?, version)),
        "DELETED" => Ok(WatchEvent::Deleted(head.key(kind)?, version)),
        "BOOKMARK" => Ok(WatchEvent::Bookmark(version)),
        other => Err(format!("an event of type {other:?}")),
    }
}

/// What can be read of an object that may be unreadable otherwise.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    metadata: Value,
}

impl Head {
    fn of(object: &RawValue) -> Result<Self, String> {
        serde_json::from_str(object.get()).map_err(|error| error.to_string())
    }

    fn key(&self, kind: Kind) -> Result<ObjectKey, String> {
        let name = self.metadata["name"].as_str().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| format!("a {} without metadata.name", kind.as_str()))?;
        let namespace = match kind {
            Kind::Node => "",
            _ => self.metadata["namespace"].as_str().unwrap_or("default"),
        };
        Ok(ObjectKey {
            kind,
            name: ObjectName::new(namespace, name),
        })
    }
}

fn read_item(object: &RawValue, kind: Kind, converter: &mut Converter<'_>) -> Result<Converted, String> {
    let text = object.get();
    let converted = match kind {
        Kind::Slice => serde_json::from_str(text).map(|slice: discovery::EndpointSlice| converter.slice(&slice)),
        Kind::Node => serde_json::from_str(text).map(|node: core::Node| converter.node(&node)),
        Kind::Pod => serde_json::from_str(text).map(|pod: PodObject| converter.pod(&pod)),
        Kind::Service | Kind::Addresses => {
            serde_json::from_str(text).map(|service: core::Service| converter.service(&service))
        }
    };
    match converted {
        Ok(converted) if converted.key.is_some() => Ok(converted),
        Ok(converted) => Head::of(object)?.key(kind).map(|_| converted),
        Err(error) => {
            let key = Head::of(object)?.key(kind)?;
            Ok(Converted {
                problems: vec![Problem {
                    origin: converter.origin.to_string(),
                    object: object_label(kind, &key.name.namespace, &key.name.name),
                    field: "(object)".to_owned(),
                    message: format!("cannot be read: {}", without_place(&error)),
                }],
                key: Some(key),
                object: None,
            })
        }
    }
}

/// An error without its place in a text that nobody sees; the same mistake is told in the same words, wherever it was read.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&place).unwrap_or(&text).to_owned()
}

struct PageSeed<'a, 'c> {
    kind: Kind,
    converter: &'a mut Converter<'c>,
    take: &'a mut dyn FnMut(Converted),
}

impl<'de> DeserializeSeed<'de> for PageSeed<'_, '_> {
    type Value = PageHead;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<PageHead, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for PageSeed<'_, '_> {
    type Value = PageHead;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a {}List", self.kind.as_str())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<PageHead, A::Error> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct ListMeta {
            resource_version: String,
            r#continue: Option<String>,
        }

        let wanted = format!("{}List", self.kind.as_str());
        let (mut kind, mut metadata, mut items) = (None, None, false);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "kind" => kind = Some(map.next_value::<String>()?),
                "metadata" => metadata = Some(map.next_value::<ListMeta>()?),
                "items" => {
                    map.next_value_seed(ItemsSeed(&mut self))?;
                    items = true;
                }
                _ => {
                    map.next_value::<serde::de::IgnoredAny>()?;
                }
            }
        }
        if kind.as_deref() != Some(&wanted) {
            return Err(A::Error::custom(format!("found kind {kind:?}; wanted {wanted}")));
        }
        let metadata = metadata.unwrap_or_default();
        let next = metadata.r#continue.filter(|token| !token.is_empty());
        if !items {
            return Err(A::Error::custom("a list without items"));
        }
        if metadata.resource_version.is_empty() {
            return Err(A::Error::custom("a list without metadata.resourceVersion"));
        }
        Ok(PageHead {
            version: metadata.resource_version,
            next,
        })
    }
}

struct ItemsSeed<'p, 'a, 'c>(&'p mut PageSeed<'a, 'c>);

impl<'de> DeserializeSeed<'de> for ItemsSeed<'_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ItemsSeed<'_, '_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of items")
    }

    /// Go writes an empty list as null in places.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let PageSeed { kind, converter, take } = self.0;
        while let Some(item) = seq.next_element::<&RawValue>()? {
            take(read_item(item, *kind, converter).map_err(A::Error::custom)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::{model::Object, source::convert::Names};

    fn page(text: &str, kind: Kind) -> Result<(PageHead, Vec<Converted>), String> {
        let mut names = Names::default();
        let origin = names.share("API server");
        let mut converter = Converter {
            origin,
            names: &mut names,
        };
        let mut all = Vec::new();
        let head = read_page(text.as_bytes(), kind, &mut converter, &mut |item| all.push(item))?;
        Ok((head, all))
    }

    fn read(text: &str) -> Result<WatchEvent, String> {
        let mut names = Names::default();
        let origin = names.share("API server");
        let mut converter = Converter {
            origin,
            names: &mut names,
        };
        read_event(text.as_bytes(), Kind::Service, &mut converter)
    }

    fn services(items: &str) -> String {
        format!(r#"{{"kind":"ServiceList","metadata":{{"resourceVersion":"7","continue":"t"}},"items":{items}}}"#)
    }

    #[test]
    fn an_item_that_cannot_be_read_is_its_own_problem_alone() {
        let items = r#"[
            {"metadata": {"name": "\u0061", "namespace": "s"}, "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}},
            {"metadata": {"name": "b"}, "spec": {"ports": "none"}},
            {"metadata": {"name": "c"}, "spec": {"clusterIP": "10.96.0.3", "ports": [{"port": 80}]}}
        ]"#;
        let (head, all) = page(&services(items), Kind::Service).expect("a page");
        assert_eq!((head.version.as_str(), head.next.as_deref()), ("7", Some("t")));
        let names: Vec<String> = all
            .iter()
            .map(|item| item.key.as_ref().map_or_else(String::new, |key| key.name.to_string()))
            .collect();
        assert_eq!(names, ["s/a", "default/b", "default/c"]);
        assert_eq!(
            all.iter().map(|item| item.object.is_some()).collect::<Vec<_>>(),
            [true, false, true]
        );
        assert_eq!(all[1].problems.len(), 1);
        let said = &all[1].problems[0].message;
        assert!(
            said.starts_with("cannot be read: ") && !said.contains("column"),
            "{said}"
        );
    }

    #[test]
    fn a_page_with_a_nameless_item_is_no_answer() {
        for item in [
            "{}",
            "7",
            r#"{"metadata": null}"#,
            r#"{"metadata": {"name": ""}}"#,
            r#"{"metadata": {"name": 7}}"#,
        ] {
            assert!(page(&services(&format!("[{item}]")), Kind::Service).is_err(), "{item}");
        }
        assert_eq!(
            page(&services("null"), Kind::Service).expect("Go's empty list").1.len(),
            0
        );
        for text in ["", "[]", r#"{"kind":"PodList"}"#, &services("[{}")] {
            assert!(page(text, Kind::Service).is_err(), "{text}");
        }
    }

    #[test]
    fn events_say_what_happened_even_to_what_cannot_be_read() {
        let of = |event: &str, object: &Value| read(&json!({"type": event, "object": object}).to_string());
        let unreadable = json!({"metadata": {"name": "a", "resourceVersion": "9"}, "spec": 7});
        assert!(matches!(
            of("MODIFIED", &unreadable),
            Ok(WatchEvent::Applied(Converted { object: None, key: Some(_), .. }, version)) if version == "9"
        ));
        assert!(matches!(
            of("DELETED", &unreadable),
            Ok(WatchEvent::Deleted(key, _)) if key.name.to_string() == "default/a"
        ));
        assert!(matches!(
            of("BOOKMARK", &json!({"metadata": {"resourceVersion": "12"}})),
            Ok(WatchEvent::Bookmark(version)) if version == "12"
        ));
        assert!(matches!(
            of("ERROR", &json!({"code": 410, "message": "too old"})),
            Ok(WatchEvent::Error { code: 410, message }) if message == "too old"
        ));
        for (event, object) in [
            ("ADDED", json!({"metadata": {"name": "a"}})),
            ("DELETED", json!({"metadata": {"resourceVersion": "9"}})),
            ("MOVED", unreadable.clone()),
            ("ADDED", json!(7)),
        ] {
            assert!(of(event, &object).is_err(), "{event} {object}");
        }
    }

    proptest! {
        /// However an object is written, it is read as what it says.
        #[test]
        fn a_slice_is_read_as_the_value_that_its_text_stands_for(
            name in "[a-z]{1,8}",
            addresses in prop::collection::vec((any::<[u8; 4]>(), any::<Option<bool>>()), 0..6),
            zone in "\\PC{0,6}",
            pretty in any::<bool>(),
        ) {
            let endpoints: Vec<_> = addresses
                .iter()
                .map(|(address, ready)| json!({
                    "addresses": [std::net::Ipv4Addr::from(*address).to_string()],
                    "conditions": {"ready": ready}, "zone": zone, "unknown": {"deep": [1, 2.5, null, "x"]},
                }))
                .collect();
            let object = json!({
                "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "web"}},
                "addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 80}],
            });
            let text = if pretty { serde_json::to_string_pretty(&object) } else { serde_json::to_string(&object) };
            let text = text.expect("a value is JSON");
            let list = format!(r#"{{"kind":"EndpointSliceList","metadata":{{"resourceVersion":"7"}},"items":[{text}]}}"#);
            let (_, read) = page(&list, Kind::Slice).expect("a page");
            let mut names = Names::default();
            let origin = names.share("API server");
            let slice: discovery::EndpointSlice = serde_json::from_value(object).expect("a slice");
            let wanted = Converter { origin, names: &mut names }.slice(&slice);
            prop_assert_eq!(read.len(), 1);
            prop_assert_eq!(&read[0].key, &wanted.key);
            prop_assert_eq!(read[0].problems.len(), wanted.problems.len());
            match (&read[0].object, &wanted.object) {
                (Some(Object::Slice(read)), Some(Object::Slice(wanted))) => prop_assert_eq!(read, wanted),
                (read, wanted) => prop_assert_eq!(read.is_some(), wanted.is_some()),
            }
        }
    }
}
