//! TCP connections to Services that are open already.
//!
//! Counted once, when the agent starts: their backends were chosen before anybody watched, so they are known in number alone.
//! Sockets of pods lie in other network namespaces and are not seen from here.

use std::{
    collections::{HashMap, HashSet},
    hash::BuildHasher,
    net::SocketAddr,
    ops::ControlFlow,
};

use super::{
    Result,
    sockets::{self, ESTABLISHED},
};

/// Counts the established connections of this network namespace to each of the frontends; those without any are left out.
pub fn open_connections<S: BuildHasher>(frontends: &HashSet<SocketAddr, S>) -> Result<HashMap<SocketAddr, u64>> {
    let mut counts = HashMap::new();
    sockets::each(|socket| {
        if socket.state == ESTABLISHED && frontends.contains(&socket.remote) {
            *counts.entry(socket.remote).or_default() += 1;
        }
        ControlFlow::Continue(())
    })?;
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn connections_to_a_frontend_are_counted_and_others_are_not() {
        let listen = || {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
            let address = listener.local_addr().expect("its address");
            (listener, address)
        };
        let ((_near, dialled), (_far, other), (_idle, unused)) = (listen(), listen(), listen());
        let connect = |address| TcpStream::connect(address).expect("a connection");
        let _open = (connect(dialled), connect(dialled), connect(other));
        let counts = open_connections(&HashSet::from([dialled, unused])).expect("readable");
        assert_eq!(counts, HashMap::from([(dialled, 2)]));
    }
}
