//! A bearer token in a file that somebody keeps fresh.
//!
//! kube's client would read it anew once a minute. Requests are rare here (one watch a kind in minutes), so the file is read for
//! each: a token that was rotated is used by the next request, with no refusal in between, however soon the old one ends.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use hyper::header::HeaderValue;
use kube::config::AuthInfo;

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub(super) enum TokenError {
    #[error("the token file {path}: {source}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("the token file {path} holds no token")]
    Content { path: String },
}

/// A token file and what it held when it could last be read.
#[derive(Clone, Debug)]
pub(super) struct TokenFile {
    path: PathBuf,
    last: Arc<Mutex<Option<HeaderValue>>>,
}

impl TokenFile {
    /// Takes the token file out of what kube's client would use, where that would be used.
    pub(super) fn take(auth: &mut AuthInfo) -> Option<Self> {
        let named_before = auth.auth_provider.is_some()
            || auth.token.is_some()
            || (auth.username.is_some() && auth.password.is_some());
        if named_before {
            return None;
        }
        let path = auth.token_file.take()?.into();
        Some(Self {
            path,
            last: Arc::default(),
        })
    }

    /// The `Authorization` header of the moment. A file that cannot be read just now (it is being replaced, or was taken away after
    /// the start) leaves the last token in use.
    pub(super) async fn header(&self) -> Result<HeaderValue, TokenError> {
        let read = read(&self.path).await;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match (read, &*last) {
            (Ok(fresh), _) => Ok(last.insert(fresh).clone()),
            (Err(_), Some(last)) => Ok(last.clone()),
            (Err(error), None) => Err(error),
        }
    }
}

async fn read(path: &Path) -> Result<HeaderValue, TokenError> {
    let named = || path.display().to_string();
    let text = tokio::fs::read_to_string(path)
        .await
        .map_err(|source| TokenError::Read { path: named(), source })?;
    let token = text.trim();
    let header = (!token.is_empty()).then(|| HeaderValue::try_from(format!("Bearer {token}")).ok());
    let mut header = header.flatten().ok_or_else(|| TokenError::Content { path: named() })?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &Path) -> TokenFile {
        let mut auth = AuthInfo {
            token_file: Some(path.display().to_string()),
            ..AuthInfo::default()
        };
        let token = TokenFile::take(&mut auth).expect("a token file");
        assert!(auth.token_file.is_none(), "kube's client is not to use it beside");
        token
    }

    #[tokio::test]
    async fn each_request_has_the_token_of_the_moment() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("token");
        let token = file(&path);
        let error = token.header().await.expect_err("there is no file yet");
        assert!(matches!(error, TokenError::Read { .. }), "{error}");
        for text in ["first", "second\n", " third \r\n"] {
            std::fs::write(&path, text).expect("the file is written");
            let header = token.header().await.expect("a token");
            assert_eq!(header.to_str().expect("text"), format!("Bearer {}", text.trim()));
            assert!(header.is_sensitive());
        }
        for broken in [Some(""), Some("two\nlines"), None] {
            match broken {
                Some(text) => std::fs::write(&path, text).expect("the file is written"),
                None => std::fs::remove_file(&path).expect("the file was there"),
            }
            let header = token.header().await.expect("the last one");
            assert_eq!(header, "Bearer third", "{broken:?}");
        }
    }

    #[test]
    fn a_token_that_is_named_directly_comes_first() {
        let mut auth = AuthInfo {
            token: Some("inline".to_owned().into()),
            token_file: Some("/token".to_owned()),
            ..AuthInfo::default()
        };
        assert!(TokenFile::take(&mut auth).is_none());
        assert!(auth.token_file.is_some());
    }
}
