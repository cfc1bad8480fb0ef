//! Answers of the API server, taken apart item by item.
//!
//! Pure. Of a page only one item at a time exists as a Kubernetes object. An item that cannot be read but has a name is
//! that object's problem alone; an answer whose items have no names is no answer.

use std::fmt;

use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery};
use serde::{
    Deserialize,
    de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor},
};

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
    struct Envelope {
        #[serde(rename = "type")]
        event_type: String,
        object: serde_json::Value,
    }

    let Envelope { event_type, object } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if event_type == "ERROR" {
        return Ok(WatchEvent::Error {
            code: object["code"].as_i64().unwrap_or_default(),
            message: object["message"].as_str().unwrap_or("(no message)").to_owned(),
        });
    }
    let version = object["metadata"]["resourceVersion"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    if version.is_empty() {
        return Err(format!("a {event_type} event without metadata.resourceVersion"));
    }
    match event_type.as_str() {
        "ADDED" | "MODIFIED" => Ok(WatchEvent::Applied(read_item(&object, kind, converter)?, version)),
        "DELETED" => Ok(WatchEvent::Deleted(key_of(&object, kind)?, version)),
        "BOOKMARK" => Ok(WatchEvent::Bookmark(version)),
        other => Err(format!("an event of type {other:?}")),
    }
}

/// The identity of an object that may be unreadable otherwise.
fn key_of(object: &serde_json::Value, kind: Kind) -> Result<ObjectKey, String> {
    let metadata = &object["metadata"];
    let name = metadata["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| format!("a {} without metadata.name", kind.as_str()))?;
    let namespace = match kind {
        Kind::Node => "",
        _ => metadata["namespace"].as_str().unwrap_or("default"),
    };
    Ok(ObjectKey {
        kind,
        name: ObjectName::new(namespace, name),
    })
}

fn read_item(object: &serde_json::Value, kind: Kind, converter: &mut Converter<'_>) -> Result<Converted, String> {
    let key = key_of(object, kind)?;
    let converted = match kind {
        Kind::Slice => discovery::EndpointSlice::deserialize(object).map(|slice| converter.slice(&slice)),
        Kind::Node => core::Node::deserialize(object).map(|node| converter.node(&node)),
        Kind::Pod => PodObject::deserialize(object).map(|pod| converter.pod(&pod)),
        Kind::Service | Kind::Addresses => {
            core::Service::deserialize(object).map(|service| converter.service(&service))
        }
    };
    Ok(converted.unwrap_or_else(|error| Converted {
        problems: vec![Problem {
            origin: converter.origin.to_string(),
            object: object_label(kind, &key.name.namespace, &key.name.name),
            field: "(object)".to_owned(),
            message: format!("cannot be read: {error}"),
        }],
        key: Some(key),
        object: None,
    }))
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
        while let Some(item) = seq.next_element::<serde_json::Value>()? {
            take(read_item(&item, *kind, converter).map_err(A::Error::custom)?);
        }
        Ok(())
    }
}
