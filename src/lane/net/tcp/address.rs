//! Listening addresses of this rank, and their encoding.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::bootstrap::PeerAuth;
use crate::config::TcpAddress;
use crate::error::BootstrapError;

/// Addresses to listen at, and those that peers receive.
#[derive(Debug, PartialEq, Eq)]
pub struct ListenAddresses {
    /// The address to bind.
    pub bind: IpAddr,
    /// Addresses to try, in order. An unspecified one stands for that at which the rendezvous sees
    /// this rank.
    pub told: Vec<IpAddr>,
}

impl ListenAddresses {
    /// Those of this rank: the configured address; or loopback, if all ranks meet there; or all
    /// addresses of this machine.
    ///
    /// # Errors
    /// [`BootstrapError::BadVariable`] if the interface that was asked for has no address.
    pub fn find(pass: &PeerAuth, asked: &TcpAddress) -> Result<ListenAddresses, BootstrapError> {
        match asked {
            TcpAddress::Ip(ip) => Ok(ListenAddresses { bind: *ip, told: vec![*ip] }),
            TcpAddress::Interface(name) => {
                let of_it = |(interface, ip): (String, IpAddr)| (interface == *name).then_some(ip);
                let ip = interfaces()?.into_iter().find_map(of_it).ok_or_else(|| {
                    let expected = "an address of this machine, or an interface that has one";
                    BootstrapError::BadVariable {
                        name: "SIDELANE_TCP_ADDRESS",
                        value: name.clone(),
                        expected,
                    }
                })?;
                Ok(ListenAddresses { bind: ip, told: vec![ip] })
            }
            TcpAddress::Any if pass.is_local() => {
                let ip = pass.seen_at(pass.rank()).unwrap_or(Ipv4Addr::LOCALHOST.into());
                Ok(ListenAddresses { bind: ip, told: vec![ip] })
            }
            TcpAddress::Any => {
                // The family in which the ranks have met.
                let six = (0..).map_while(|rank| pass.seen_at(rank)).any(|ip| ip.is_ipv6());
                let bind: IpAddr =
                    if six { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
                let fits = |ip: &IpAddr| !ip.is_loopback() && ip.is_ipv6() == six;
                let others = interfaces()?.into_iter().map(|(_, ip)| ip).filter(fits);
                Ok(ListenAddresses { bind, told: std::iter::once(bind).chain(others).collect() })
            }
        }
    }

    /// The addresses as bytes for peers.
    pub fn to_text(&self, port: u16) -> String {
        let sockets = self.told.iter().map(|&ip| SocketAddr::new(ip, port).to_string());
        sockets.collect::<Vec<_>>().join(",")
    }
}

/// Addresses that a peer received, if the bytes are valid. `seen_at` is where the rendezvous sees
/// their sender.
pub fn parse(told: &[u8], seen_at: Option<IpAddr>) -> Option<Vec<SocketAddr>> {
    let resolve = |mut address: SocketAddr| {
        if address.ip().is_unspecified() {
            address.set_ip(seen_at?);
        }
        Some(address)
    };
    let addresses = std::str::from_utf8(told).ok()?.split(',');
    addresses.map(|address| address.parse().ok().and_then(resolve)).collect()
}

/// Interfaces that are up, with their addresses, IPv4 first. Addresses that mean something on one
/// link only are left out.
fn interfaces() -> Result<Vec<(String, IpAddr)>, BootstrapError> {
    let all = if_addrs::get_if_addrs().map_err(|error| BootstrapError::System {
        call: "getifaddrs",
        errno: error.raw_os_error().unwrap_or(0),
    })?;
    let mut found: Vec<_> = all
        .into_iter()
        .filter(|interface| interface.is_oper_up() && !interface.is_link_local())
        .map(|interface| (interface.name.clone(), interface.ip()))
        .collect();
    found.sort_by_key(|(_, ip)| ip.is_ipv6());
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::threads;

    #[test]
    fn ranks_that_meet_on_loopback_stay_there() {
        let pass = threads(2, Default::default())[1].pass().unwrap();
        let places = ListenAddresses::find(&pass, &TcpAddress::Any).unwrap();
        let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
        assert_eq!(places, ListenAddresses { bind: loopback, told: vec![loopback] });
        assert_eq!(parse(places.to_text(80).as_bytes(), None), Some(vec![(loopback, 80).into()]));
    }

    #[test]
    fn an_interface_stands_for_its_address_and_a_missing_one_is_an_error() {
        let pass = threads(2, Default::default())[0].pass().unwrap();
        let find = |name: &str| ListenAddresses::find(&pass, &TcpAddress::Interface(name.to_owned()));
        assert_eq!(find("lo").unwrap().told, [IpAddr::from(Ipv4Addr::LOCALHOST)]);
        let error = find("no such wire").unwrap_err();
        assert!(matches!(error, BootstrapError::BadVariable { name: "SIDELANE_TCP_ADDRESS", .. }), "{error}");
    }

    #[test]
    fn the_unspecified_address_is_where_the_rendezvous_sees_the_rank() {
        let seen = "10.1.2.3".parse().unwrap();
        let (door, other) = ("10.1.2.3:77".parse().unwrap(), "[fd00::1]:77".parse().unwrap());
        assert_eq!(parse(b"0.0.0.0:77,[fd00::1]:77", Some(seen)), Some(vec![door, other]));
        assert_eq!(parse(b"0.0.0.0:77", None), None);
        assert_eq!(parse(b"10.1.2.3", Some(seen)), None);
        assert_eq!(parse(b"\xff", Some(seen)), None);
    }
}
