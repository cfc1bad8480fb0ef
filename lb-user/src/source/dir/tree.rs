//! Documents with positions: what a manifest says, and on which line.
//!
//! A file is parsed once into a [`Tree`]; typed objects are read out of the tree, so that an error names the field's
//! path and line, whichever of the two syntaxes the file is in.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor},
};

/// A value and the line that it starts on; line 0 is unknown.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tree {
    pub(super) line: u64,
    pub(super) value: Value,
}

/// A value of YAML or JSON.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    List(Vec<Tree>),
    Map(Vec<(String, Tree)>),
}

impl Tree {
    /// The value under a key of a map.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, tree)| tree),
            _ => None,
        }
    }

    /// The text under a key of a map.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        match &self.get(key)?.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The line of a field such as `spec.ports[0].port` or `metadata.annotations[a/b]`, or of what of it exists.
    pub(super) fn line_of(&self, field: &str) -> u64 {
        let mut at = self;
        let mut rest = field;
        loop {
            let next = if let Some(inner) = rest.strip_prefix('[') {
                let Some((key, after)) = inner.split_once(']') else {
                    return at.line;
                };
                rest = after;
                match (&at.value, key.parse::<usize>()) {
                    (Value::List(items), Ok(i)) => items.get(i),
                    _ => at.get(key),
                }
            } else {
                rest = rest.strip_prefix('.').unwrap_or(rest);
                let end = rest.find(['.', '[']).unwrap_or(rest.len());
                let (key, after) = rest.split_at(end);
                rest = after;
                at.get(key)
            };
            match next {
                Some(next) => at = next,
                None => return at.line,
            }
            if rest.is_empty() {
                return at.line;
            }
        }
    }

    /// What people call this kind of value.
    pub(super) fn describe(&self) -> &'static str {
        match self.value {
            Value::Null => "nothing",
            Value::Bool(_) => "a boolean",
            Value::Integer(_) | Value::Float(_) => "a number",
            Value::Text(_) => "a text",
            Value::List(_) => "a list",
            Value::Map(_) => "a map",
        }
    }
}

/// A tree that knows its lines, if it is read from YAML.
pub(super) struct Located(pub(super) Tree);

/// A tree that does not know its lines.
pub(super) struct Unlocated(pub(super) Tree);

impl From<Located> for Tree {
    fn from(located: Located) -> Self {
        located.0
    }
}

impl From<Unlocated> for Tree {
    fn from(unlocated: Unlocated) -> Self {
        unlocated.0
    }
}

impl<'de> Deserialize<'de> for Located {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Inner(Value);

        impl<'de> Deserialize<'de> for Inner {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(Any::<Located>(PhantomData)).map(Self)
            }
        }

        let spanned = serde_saphyr::Spanned::<Inner>::deserialize(deserializer)?;
        Ok(Self(Tree {
            line: spanned.referenced.line(),
            value: spanned.value.0,
        }))
    }
}

impl<'de> Deserialize<'de> for Unlocated {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = deserializer.deserialize_any(Any::<Self>(PhantomData))?;
        Ok(Self(Tree { line: 0, value }))
    }
}

/// Builds any value; what lies in it is read as `T`.
struct Any<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Into<Tree>> Visitor<'de> for Any<T> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E>(self, bool: bool) -> Result<Value, E> {
        Ok(Value::Bool(bool))
    }

    fn visit_i64<E>(self, integer: i64) -> Result<Value, E> {
        Ok(Value::Integer(integer))
    }

    fn visit_u64<E>(self, integer: u64) -> Result<Value, E> {
        Ok(i64::try_from(integer).map_or(Value::Float(integer as f64), Value::Integer))
    }

    fn visit_f64<E>(self, float: f64) -> Result<Value, E> {
        Ok(Value::Float(float))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(Value::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element::<T>()? {
            items.push(item.into());
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some((key, value)) = map.next_entry::<String, T>()? {
            entries.push((key, value.into()));
        }
        Ok(Value::Map(entries))
    }
}

/// Why a tree is not the wanted object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mismatch {
    /// The field's path; empty for the document itself.
    pub(super) field: String,
    /// The field's line; 0 is unknown.
    pub(super) line: u64,
    /// What was found and what was expected.
    pub(super) message: String,
}

impl Mismatch {
    fn within(mut self, step: &str, line: u64) -> Self {
        if step.is_empty() || self.field.is_empty() || self.field.starts_with('[') {
            self.field.insert_str(0, step);
        } else {
            self.field = format!("{step}.{}", self.field);
        }
        if self.line == 0 {
            self.line = line;
        }
        self
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

impl std::error::Error for Mismatch {}

impl de::Error for Mismatch {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self {
            field: String::new(),
            line: 0,
            message: message.to_string(),
        }
    }
}

/// Reads a typed object out of a tree.
pub(super) fn read<'a, T: Deserialize<'a>>(tree: &'a Tree) -> Result<T, Mismatch> {
    T::deserialize(tree).map_err(|mismatch| mismatch.within("", tree.line))
}

impl<'de> Deserializer<'de> for &'de Tree {
    type Error = Mismatch;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mismatch> {
        match &self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(bool) => visitor.visit_bool(*bool),
            Value::Integer(integer) => visitor.visit_i64(*integer),
            Value::Float(float) => visitor.visit_f64(*float),
            Value::Text(text) => visitor.visit_borrowed_str(text),
            Value::List(items) => visitor.visit_seq(Items {
                items: items.iter().enumerate(),
            }),
            Value::Map(entries) => visitor.visit_map(Entries {
                entries: entries.iter(),
                value: None,
            }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mismatch> {
        match self.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Mismatch> {
        visitor.visit_newtype_struct(self)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct enum identifier ignored_any
    }
}

struct Items<'a> {
    items: std::iter::Enumerate<std::slice::Iter<'a, Tree>>,
}

impl<'de> SeqAccess<'de> for Items<'de> {
    type Error = Mismatch;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Mismatch> {
        let Some((i, item)) = self.items.next() else {
            return Ok(None);
        };
        let element = seed.deserialize(item);
        element.map(Some).map_err(|e| e.within(&format!("[{i}]"), item.line))
    }
}

struct Entries<'a> {
    entries: std::slice::Iter<'a, (String, Tree)>,
    value: Option<&'a (String, Tree)>,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = Mismatch;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Mismatch> {
        self.value = self.entries.next();
        let Some((key, tree)) = self.value else {
            return Ok(None);
        };
        let key_deserializer = de::value::StrDeserializer::<Mismatch>::new(key);
        seed.deserialize(key_deserializer.into_deserializer())
            .map(Some)
            .map_err(|e| e.within(key, tree.line))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Mismatch> {
        let Some((key, tree)) = self.value.take() else {
            return Err(de::Error::custom("a value was asked for before its key"));
        };
        seed.deserialize(tree).map_err(|e| e.within(key, tree.line))
    }
}
